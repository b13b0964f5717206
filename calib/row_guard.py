"""Calibration rows with NaN or infinite activations: left out, counted, and too many refused."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.errors import UserError
from .model import LayerCall

MAX_DROPPED = 0.1  # share of calibration rows that may be non-finite


class RowGuard:
    """Leaves rows with non-finite values out of the statistics, counts them, stops past a limit."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._bad: set[int] = set()

    @property
    def dropped(self) -> list[int]:
        return sorted(self._bad)

    def finite_rows(self, first: int, call: LayerCall, x: Tensor) -> Tensor:
        """x without its non-finite rows: what a linear reads when the layer is called with `call`,
        whose first row is `first`.

        x is [rows, seq, features], or flattened to [rows * seq, features]. Some other number of
        tokens (an expert's) cannot be traced to rows: its non-finite ones are left out one by one.
        """
        rows, seq = call.hidden.shape[:2]
        if x.ndim == 2 and len(x) == rows * seq:
            x = x.reshape(rows, seq, -1)
        # a sum is finite when all its terms are, where the sum of as many cannot overflow
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        finite = torch.isfinite(x.flatten(1).sum(1, dtype=wide))
        if bool(finite.all()):
            return x
        if x.ndim == 3:
            self._bad.update((first + torch.nonzero(~finite)[:, 0]).tolist())
        if len(self._bad) > MAX_DROPPED * self._rows:
            raise UserError(
                f"{len(self._bad)} of {self._rows} calibration rows hold NaN or infinite "
                f"activations (limit {MAX_DROPPED:.0%}); use --dtype float32 or another text"
            )
        return x[finite]
