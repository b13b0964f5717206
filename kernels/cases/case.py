"""What a case is: an op, one of its shipped configurations, operands of some shape, its bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..triton_ops.launch import Launch

Size = Literal["small", "real"]
Operands = dict[str, Tensor | None]
Results = Tensor | tuple[Tensor, ...]


class Maker:
    """Makes operands: random ones on a device, or ones without memory on "meta"."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = torch.device(device)
        self._generator = None
        if self.device.type != "meta":
            self._generator = torch.Generator(device=self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float16, std: float = 1.0) -> Tensor:
        """Normal numbers, rounded to `dtype`."""
        x = torch.empty(shape, dtype=torch.float32, device=self.device)
        return x.normal_(0.0, std, generator=self._generator).to(dtype)

    def uniform(
        self, *shape: int, low: float, high: float, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Even numbers from low to high, rounded to `dtype`."""
        x = torch.empty(shape, dtype=torch.float32, device=self.device)
        return x.uniform_(low, high, generator=self._generator).to(dtype)

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """Whole numbers, low <= n < high."""
        x = torch.empty(shape, dtype=torch.int64, device=self.device)
        return x.random_(low, high, generator=self._generator).to(dtype)


@dataclass(frozen=True)
class Bars:
    """What the audit holds a case to.

    once: operands of which at most 1.02 of their bytes are moved (each read or written once).
    wide: operands whose every load must be 128 bits, or a bulk copy.
    tensor_cores: what matrices are multiplied in; None for ops that multiply none.
    tile_rows: rows of the tile that tensor cores multiply: from 64 on Hopper and Blackwell have
        instructions of their own.
    codes_in_loop: packed codes that one pass of a launch's loop unpacks in a program; instructions
        of the loop are counted per code. None: nothing is unpacked.
    max_logic: how many logic, shift and permute instructions a code may take on CUDA, and no
        conversion of whole numbers to floats; None: counted only.
    """

    once: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    tensor_cores: Literal["fp16", "int8", "fp8", "fp4"] | None = None
    tile_rows: int = 64
    codes_in_loop: Callable[[Launch], int] | None = None
    max_logic: float | None = None


@dataclass(frozen=True)
class Case:
    """One op with one shipped configuration on operands of one shape.

    make: the operands, by name. run: the op on them, which goes through `launch.launch` and
    allocates its own outputs. reference: the same by plain torch in float64.
    tolerance: of ||run - reference|| / ||reference||, for each result.
    operations: multiplications and additions of the op's definition.
    targets: names of the targets that this configuration is shipped for ("sm_90"); empty: all.
    ci: whether CI compiles it; the others are left to `python -m lowbit.kernels.audit`.
    floor: bytes of an operand that the op must move, where that is not all of them.
    by_row: operands with a row for each token, all as many: results of some rows alone must have
        the same bits as in the whole batch. Empty: not checked.
    worth: what results stand for, where that and not they are compared with the reference's.
    """

    op: str
    label: str
    make: Callable[[Maker], Operands]
    run: Callable[[Operands], Results]
    reference: Callable[[Operands], Results]
    tolerance: float
    bars: Bars = Bars()
    operations: int = 0
    targets: tuple[str, ...] = ()
    ci: bool = False
    floor: Callable[[Operands], dict[str, int]] | None = None
    by_row: tuple[str, ...] = ()
    worth: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"
