"""What a compiled kernel's machine code shows: resources, tensor cores, and work a loop pass.

CUDA's is read with `cuobjdump` and `nvdisasm`, which Triton brings, HIP's is Triton's own text. The
loop is the longest in which matrices are multiplied (`loops.py`).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ..triton_ops.launch import Launch, Target
from .compile import signature_of
from .dataflow import GlobalLoad, llir_loads, ptx_loads
from .loops import longest_loop


class MachineCode(NamedTuple):
    """registers: a thread's. shared: bytes a program uses. stack: bytes a thread keeps in memory.
    spills: instructions that move registers there. loads: bits of each load of an argument.
    loop_conversions, loop_logic: instructions in the loop that turn whole numbers into floats; that
    are logic, shifts, permutations. loop_length: all of its instructions."""

    registers: int
    shared: int
    stack: int
    spills: int
    text: str
    loads: dict[str, list[int]]
    loop_conversions: int
    loop_logic: int
    loop_length: int


_LABEL = re.compile(r"^(\.[\w.$]+):")
_CUDA_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;")
_HIP_INSTRUCTION = re.compile(r"^\s+([a-z]\w+\b[^;]*)")
_MATRIX = re.compile(r"^(?:[A-Z0-9]*MMA|v_mfma)")
_CONVERSION = re.compile(r"^(?:I2F|v_cvt_(?:f32|f16)_[iu])")
_LOGIC = re.compile(
    r"^(?:LOP3|SHF|PRMT|BFE|SGXT|v_and|v_or|v_xor|v_lshl|v_lshr|v_ashr|v_perm|v_bfe|v_bfi|v_alignb)"
)


def read_machine_code(compiled: Any, launch: Launch, target: Target) -> MachineCode:
    """Everything that the audit looks at in Triton's `compiled` kernel of `launch`."""
    types = signature_of(launch).types
    arguments = [name for name, kind in types.items() if kind != "constexpr"]
    if target.backend == "cuda":
        text, registers, stack = _disassemble(compiled.asm["cubin"])
        lines, loads = _cuda_lines(text), ptx_loads(compiled.asm["ptx"])
        spills = sum(i.startswith(("LDL", "STL")) for i in lines)
    else:
        text = compiled.asm["amdgcn"]
        lines, loads = _hip_lines(text), llir_loads(compiled.asm["llir"])
        registers, stack, spills = (
            _metadata(text, key)
            for key in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        )
    loop = longest_loop(lines, _MATRIX.match)
    return MachineCode(
        registers, compiled.metadata.shared, stack, spills, "\n".join(lines),
        _by_argument(loads, arguments),
        sum(_CONVERSION.match(i) is not None for i in loop),
        sum(_LOGIC.match(i) is not None for i in loop), len(loop),
    )  # fmt: skip


def _by_argument(loads: list[GlobalLoad], arguments: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for load in loads:
        found.setdefault(arguments[load.argument], []).append(load.bits)
    return found


def _disassemble(cubin: bytes) -> tuple[str, int, int]:
    """(SASS, registers, stack bytes) of a cubin with one kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output(tools / "nvdisasm", "-c", file.name)
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return text, int(found[1]), int(found[2])


def _output(tool: Path, *arguments: str) -> str:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _cuda_lines(text: str) -> list[str]:
    """Labels, which end in a colon, and instructions in order; of those by which control leaves a
    block with their predicates."""
    lines = []
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            lines.append(label[1] + ":")
        elif (instruction := _CUDA_INSTRUCTION.match(line)) is not None:
            leaves = instruction[2].startswith(("BRA", "EXIT", "RET")) and instruction[1]
            lines.append(f"{instruction[1].strip()} {instruction[2]}" if leaves else instruction[2])
    return lines


def _hip_lines(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            lines.append(label[1] + ":")
        elif (instruction := _HIP_INSTRUCTION.match(line)) is not None:
            lines.append(instruction[1])
    return lines


def _metadata(text: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", text)
    assert found is not None, key
    return int(found[1])
