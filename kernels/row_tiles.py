"""Products of one fixed shape, so that a row comes out alike whatever runs beside it.

Libraries pick an algorithm by a product's shape: a row alone goes through a matrix-vector kernel,
whose sums have another order than those of sixteen rows. Here rows go through in tiles of a fixed
number, the last one filled up with zeros. That it does not matter where in a tile a row stands is a
property of the library, which `runtime/invariance.py` checks on the model at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU_ROWS = 16
GPU_ROWS = 64


def in_row_tiles(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """product(x) for x [..., in], computed on tiles of x's rows: [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    size = CPU_ROWS if x.device.type == "cpu" else GPU_ROWS
    short = -len(rows) % size
    if short:
        rows = F.pad(rows, (0, 0, 0, short))
    parts = [product(tile) for tile in rows.split(size)]
    if not parts:
        return product(rows).view(*x.shape[:-1], -1)
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y[: len(y) - short].view(*x.shape[:-1], y.shape[-1])


def row_tiles(wanted: bool) -> AbstractContextManager[Any]:
    """A context in which torch's own linears are computed by `in_row_tiles`, if that is wanted."""
    return _RowTiles() if wanted else nullcontext()


class _RowTiles(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, rest = args[0], args[1:]
            return in_row_tiles(lambda tile: func(tile, *rest, **kwargs), x)
        if func is torch.addmm and not kwargs and args[0].ndim == 1:
            return in_row_tiles(lambda tile: func(args[0], tile, args[2]), args[1])
        return func(*args, **kwargs)
