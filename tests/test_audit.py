"""What the audit reads from machine code and counts in the interpreter; faults that it finds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from lowbit.kernels.audit.compile import signature_of
from lowbit.kernels.audit.dataflow import GlobalLoad, llir_loads, ptx_loads
from lowbit.kernels.audit.loops import longest_loop
from lowbit.kernels.audit.machine_code import _MATRIX, _cuda_lines
from lowbit.kernels.audit.report import write_tables
from lowbit.kernels.audit.targets import DEVICES, TARGETS, predicted_seconds, tensor_core_pattern
from lowbit.kernels.audit.traffic import Moved
from lowbit.kernels.audit.verdict import Verdict, moved_faults
from lowbit.kernels.cases import all_cases
from lowbit.kernels.triton_ops.launch import Launch, Warps

PTX = """
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	ld.param.b32 	%r9, [kernel_param_2];
	mul.wide.s32 	%rd3, %r9, 4;
	add.s64 	%rd4, %rd1, %rd3;
	mov.b64 	%rd5, %rd4;
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd5 + 0 ];
	add.s64 	%rd6, %rd2, %rd3;
	cp.async.cg.shared.global [ %r5 + 0 ], [ %rd6 + 16 ], 0x10, %r6;
	cp.async.ca.shared.global [ %r5 + 0 ], [ %rd6 + 0 ], 0x4, %r6;
	ld.global.b16 %rs1, [ %rd2 + 0 ];
"""

LLIR = """
define amdgpu_kernel void @k(ptr addrspace(1) inreg %0, ptr addrspace(1) inreg %1, i32 inreg %2) {
  %10 = getelementptr i16, ptr addrspace(1) %1, i64 %9
  %11 = load <8 x i16>, ptr addrspace(1) %10, align 16, !dbg !5
  %12 = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %0, i16 0)
  %13 = tail call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %12, i32 %2)
  %14 = load half, ptr addrspace(1) %0, align 2
}
"""

SASS = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0] ;
.L_x_1:
        /*0010*/                   LOP3.LUT R1, R2, 0xf, R3, 0xea, !PT ;
        /*0020*/              @!P0 BRA `(.L_x_9) ;
        /*0030*/                   HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24 ;
        /*0040*/                   SHF R0, R1 ;
        /*0050*/               @P1 BRA `(.L_x_8) ;
        /*0060*/                   BRA `(.L_x_1) ;
.L_x_9:
        /*0070*/                   PRMT R0, R1, 0x5410, R2 ;
        /*0080*/                   EXIT ;
.L_x_8:
        /*0090*/                   SYNCS R1 ;
        /*00a0*/                   BRA `(.L_x_9) ;
"""


def test_loads_are_traced_to_arguments():
    assert ptx_loads(PTX) == [
        GlobalLoad(0, 128), GlobalLoad(1, 128), GlobalLoad(1, 32), GlobalLoad(1, 16)
    ]  # fmt: skip
    assert llir_loads(LLIR) == [GlobalLoad(1, 128), GlobalLoad(0, 128), GlobalLoad(0, 16)]


def test_the_loop_is_a_natural_one():
    """Moved blocks after it are none of it, and its jump back need not be conditional."""
    assert [x.split()[0] for x in longest_loop(_cuda_lines(SASS), _MATRIX.match)] == [
        "LOP3.LUT", "@!P0", "HGMMA.64x16x16.F32", "SHF", "@P1", "BRA",
    ]  # fmt: skip


MOVED_WAIT = """
.text.kernel:
        /*0000*/               @P6 BRA `(.L_x_9) ;
        /*0008*/               @P5 EXIT ;
.L_x_1:
        /*0010*/                   LOP3.LUT R1, R2, 0xf, R3, 0xea, !PT ;
        /*0020*/                   BRA.DIV ~URZ, `(.L_x_8) ;
.L_x_2:
        /*0030*/                   HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
.L_x_9:
        /*0050*/                   EXIT ;
.L_x_8:
        /*0060*/                   SYNCS R1 ;
        /*0070*/              @!P1 BRA `(.L_x_8) ;
        /*0080*/                   BRA `(.L_x_2) ;
"""


def test_nothing_leads_on_from_the_end_of_a_kernel():
    """A wait that was moved behind it is entered from the loop alone, and is a part of it."""
    assert [x.split()[0] for x in longest_loop(_cuda_lines(MOVED_WAIT), _MATRIX.match)] == [
        "LOP3.LUT", "BRA.DIV", "HGMMA.64x16x16.F32", "@P0", "SYNCS", "@!P1", "BRA",
    ]  # fmt: skip


def test_a_signature_is_what_triton_would_specialize_on():
    class Kernel:
        arg_names = ("x_ptr", "bias_ptr", "M", "N", "K", "eps", "BLOCK")

    x = torch.empty(4, dtype=torch.float8_e4m3fn, device="meta")
    args = {"x_ptr": x, "bias_ptr": None, "M": 1, "N": 32, "K": 5 << 33, "eps": 1e-5}
    types, constants, attributes = signature_of(
        Launch(Kernel(), (1,), args, {"BLOCK": 16}, Warps())
    )
    assert list(types.values()) == [
        "*fp8e4nv", "constexpr", "constexpr", "i32", "i64", "fp32", "constexpr"
    ]  # fmt: skip
    assert constants == {"bias_ptr": None, "M": 1, "BLOCK": 16}
    assert set(attributes) == {(0,), (3,), (4,)}


def test_floors_and_instructions():
    assert predicted_seconds(DEVICES["H200"], 48 * 10**8, 1, "fp16") == pytest.approx(1e-3)
    assert predicted_seconds(DEVICES["A100"], 1, 312 * 10**9, "fp16") == pytest.approx(1e-3)
    assert tensor_core_pattern("sm_90", "fp16", 16) == r"\bHMMA"
    assert "HGMMA" in tensor_core_pattern("sm_90", "fp16", 64)
    assert all(tensor_core_pattern(t, k, 64) for t in TARGETS for k in ("fp16", "int8", "fp8"))


def test_more_bytes_than_the_bar_are_a_fault():
    case = next(c for c in all_cases("small", "wna16") if c.ci)
    whole = {"words": Moved(100, 0, 100), "scale": Moved(102, 0, 100)}
    assert moved_faults(case, whole) == []
    assert moved_faults(case, whole | {"scale": Moved(150, 0, 100)}) == [
        "moves 1.500 of the bytes of scale, over 1.02"
    ]


def test_tables_replace_what_stands_between_the_markers(tmp_path):
    document = tmp_path / "kernels.md"
    others = "<!-- audit a8 -->\nkept\n<!-- /audit a8 -->\n"
    document.write_text(
        f"before\n<!-- audit wna16 -->\nold\n<!-- /audit wna16 -->\n{others}after\n"
    )
    case = next(c for c in all_cases("real", "wna16") if c.ci)
    verdict = Verdict(case.name, "sm_90", 64, 1024, cores="HGMMA", faults=("spills",))
    moved = {case.name: {"words": Moved(8, 0, 8), "other": Moved(1, 2, 0)}}
    for _ in range(2):
        write_tables(document, "wna16", [case], [verdict], moved)
    text = document.read_text()
    assert text.startswith("before\n<!-- audit wna16 -->\n")
    assert text.endswith(f"<!-- /audit wna16 -->\n{others}after\n")
    assert "old" not in text and text.count("| HGMMA |") == 1 and "words 1.00" in text
    document.write_text("no markers")
    with pytest.raises(ValueError, match="lacks the lines"):
        write_tables(document, "wna16", [case], [verdict], moved)


@pytest.mark.parametrize("target", ["sm_90"])
def test_a_case_compiled_for_hopper_meets_its_bars(target):
    """In a process without the interpreter; and the same case with too much asked of it fails."""
    pytest.importorskip("triton")
    code = (
        "import dataclasses\n"
        "from lowbit.kernels.audit.verdict import audit_case\n"
        "from lowbit.kernels.cases import all_cases\n"
        "case = next(c for c in all_cases('real', 'wna16') if c.ci)\n"
        f"verdict = audit_case(case, '{target}')\n"
        "assert not verdict.faults, verdict\n"
        "assert verdict.cores.startswith('HGMMA') and verdict.widths == 'words:128', verdict\n"
        "assert 0.6 < verdict.logic <= 1.25 and not verdict.conversions, verdict\n"
        "assert 4 < verdict.instructions < 12, verdict\n"
        "more = {'max_logic': 0.1, 'tensor_cores': 'fp8', 'wide': ('locks',)}\n"
        "bars = dataclasses.replace(case.bars, **more)\n"
        f"faults = audit_case(dataclasses.replace(case, bars=bars), '{target}').faults\n"
        "assert len(faults) == 3, faults\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
