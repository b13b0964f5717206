"""Single ops of a tape on tensors, and walkers that tests share: each takes long to compile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from lowbit.kernels.compiled import decline_compiled
from torch import Tensor

needs_tape = pytest.mark.skipif(decline_compiled() is not None, reason=str(decline_compiled()))
if decline_compiled() is None:
    from lowbit.kernels.tape import program
    from lowbit.kernels.tape.team import Walker

    _walker = program.walker

FORMATS: dict[str, frozenset[tuple[int, bool]]] = {
    "float32": frozenset({(4, False), (4, True), (8, False), (8, True)}),
    "bfloat16": frozenset({(4, False)}),
    "float16": frozenset(),
}


def shared_walker(dtype: str, formats: frozenset[tuple[int, bool]], ops: frozenset[int]) -> Walker:
    """One of all ops in place of program.walker, which compiles those of a tape."""
    assert formats <= FORMATS[dtype]
    return _walker(dtype, FORMATS[dtype], frozenset(program.Op))


def run_ops(
    ops: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, **registers: int | Tensor
) -> None:
    """Run ops with registers set by name: those of Register, and of KindRegister for kind 0."""
    values = np.zeros(program.Register.KINDS + program.KindRegister.COUNT, np.int64)
    for name, value in registers.items():
        if name in program.Register.__members__:
            at = int(program.Register[name])
        else:
            at = program.Register.KINDS + program.KindRegister[name]
        values[at] = value.data_ptr() if isinstance(value, Tensor) else value
    program.Tape(str(dtype).removeprefix("torch."), ops).run(values)
