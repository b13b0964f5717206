"""One kernel for one target held to its bars: what was found, and what falls short."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from torch import Tensor

from ..cases.case import Case, Maker
from ..triton_ops.launch import Launch, recording
from .compile import compile_launch
from .machine_code import MachineCode, read_machine_code
from .targets import SHARED_LIMIT, TARGETS, tensor_core_pattern
from .traffic import Moved

MOST_MOVED = 1.02
WIDE_BITS = 128


class Verdict(NamedTuple):
    """A row of the audit's table. cores: the tensor-core instruction found. widths: bits of the
    narrowest load of each operand that must be wide. conversions, logic, instructions: of the loop,
    a code: from whole numbers to floats; logic, shifts and permutations; all."""

    case: str
    target: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spills: int = 0
    cores: str = ""
    widths: str = ""
    conversions: float = 0.0
    logic: float = 0.0
    instructions: float = 0.0
    seconds: float = 0.0
    faults: tuple[str, ...] = ()


def audit_case(case: Case, target: str) -> Verdict:
    """Compile the largest launch of `case` for `target` and hold it to the bars."""
    start = time.perf_counter()
    try:
        launch, tensors = _recorded(case, target)
        code = read_machine_code(compile_launch(launch, TARGETS[target]), launch, TARGETS[target])
    except Exception as e:  # whatever a compiler raises is the finding
        reason = f"does not compile: {type(e).__name__}: {str(e).strip().splitlines()[0]}"
        return Verdict(case.name, target, faults=(reason,))
    return _judge(case, target, launch, tensors, code)._replace(seconds=time.perf_counter() - start)


def _recorded(case: Case, target: str) -> tuple[Launch, dict[int, str]]:
    """The launch that the bars are about (the first), and operands by their memory."""
    operands = case.make(Maker("meta"))
    with recording(TARGETS[target]) as launches:
        case.run(operands)
    return launches[0], {_memory(t): name for name, t in operands.items() if t is not None}


def _memory(tensor: Tensor) -> int:
    """The same for a tensor and its views."""
    return tensor.untyped_storage()._cdata


def _judge(
    case: Case, target: str, launch: Launch, names: dict[int, str], code: MachineCode
) -> Verdict:
    bars, faults = case.bars, []
    if code.stack or code.spills:
        faults.append(f"keeps {code.stack} bytes a thread in memory, {code.spills} spills")
    if code.shared > SHARED_LIMIT[target]:
        faults.append(f"uses {code.shared} bytes of shared memory of {SHARED_LIMIT[target]}")
    cores = _cores(code.text)
    if bars.tensor_cores is not None:
        pattern = tensor_core_pattern(target, bars.tensor_cores, bars.tile_rows)
        if re.search(pattern, code.text, re.MULTILINE) is None:
            faults.append(f"multiplies with {cores or 'no tensor cores'}, not {pattern}")
    arguments = {
        names.get(_memory(t), ""): argument
        for argument, t in launch.args.items()
        if isinstance(t, Tensor)
    }
    widths = {o: min(code.loads.get(arguments.get(o, ""), [0])) for o in bars.wide}
    faults += [f"loads {o} {w} bits at a time" for o, w in widths.items() if w < WIDE_BITS]
    threads = launch.warps.num_warps * (64 if TARGETS[target].backend == "hip" else 32)
    codes = bars.codes_in_loop(launch) / threads if bars.codes_in_loop else 0
    if codes and not code.loop_logic:
        faults.append("shows no loop in which codes are unpacked")
    conversions = code.loop_conversions / codes if codes else 0.0
    logic = code.loop_logic / codes if codes else 0.0
    if bars.max_logic is not None and TARGETS[target].backend == "cuda":
        if conversions:
            faults.append(f"{conversions:.2f} conversions a code")
        if logic > bars.max_logic:
            faults.append(f"{logic:.2f} logic instructions a code, over {bars.max_logic}")
    shown = " ".join(f"{o}:{w}" for o, w in widths.items())
    return Verdict(
        case.name, target, code.registers, code.shared, code.stack, code.spills, cores, shown,
        conversions, logic, code.loop_length / codes if codes else 0.0, 0.0, tuple(faults),
    )  # fmt: skip


def _cores(text: str) -> str:
    """The instruction that multiplies matrices, without operands."""
    found = re.search(r"^(UTC\w*MMA|[A-Z]*G?MMA[\w.]*|v_mfma\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def moved_faults(case: Case, moved: dict[str, Moved]) -> list[str]:
    """Operands of which more than once their bytes are moved."""
    return [
        f"moves {moved[name].ratio:.3f} of the bytes of {name}, over {MOST_MOVED}"
        for name in case.bars.once
        if moved[name].ratio > MOST_MOVED
    ]
