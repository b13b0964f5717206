"""A tensor of a file, and its bytes from a checkpoint: codes stay as they are where they fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ..checkpoint.load import Checkpoint
from ..quantized import Quantized
from .blocks.plain import BF16, F32
from .names import Target
from .repack import repack
from .writer import Planned

HALF_MAX = 65504.0  # largest float16, the type of values or scales


class Entry(NamedTuple):
    """A tensor of the file, and what it comes from: its modules as the checkpoint names them.

    `importance`: of the input columns of each module, float32 [modules, columns]; `unfit`: the type
    whose blocks do not divide the columns.
    """

    planned: Planned
    target: Target
    modules: tuple[str, ...]
    importance: Tensor | None = None
    unfit: str | None = None


def encode(checkpoint: Checkpoint, entry: Entry) -> tuple[Tensor, bool | None]:
    """The bytes of a tensor, and for quantized layers whether their codes were kept."""
    parts = [_encode_module(checkpoint, entry, module) for module in entry.modules]
    kept = [exact for _, exact in parts if exact is not None]
    blocks = parts[0][0] if len(parts) == 1 else torch.cat([blocks for blocks, _ in parts])
    return blocks, all(kept) if kept else None


def _encode_module(checkpoint: Checkpoint, entry: Entry, module: str) -> tuple[Tensor, bool | None]:
    """What one module's tensor gives of the bytes."""
    target, codec = entry.target, entry.planned.codec
    if target.part == "weight" and module in checkpoint.schemes:
        q = checkpoint.quantized(module)
        _check_shape(q.codes, entry, module)
        if q.spec.type != "int" or q.spec.block is not None or q.g_idx is not None:
            # no block type holds such codes
            return _encode_dense(target.place(q.dequantize()), entry, module), False
        rows = q.codes.shape[0]
        zero = q.zero_point
        q = Quantized(
            target.place(q.codes),
            target.place(q.scale.expand(rows, -1)),
            None if zero is None else target.place(zero.expand(rows, -1)),
            q.spec,
        )
        if (blocks := repack(q, codec)) is not None:
            return blocks, True
        return _encode_dense(q.dequantize(), entry, module), False
    x = checkpoint.shards.get(f"{module}.{target.part}").to(torch.float32)
    _check_shape(x, entry, module)
    return _encode_dense(target.place(x), entry, module), None


def _encode_dense(x: Tensor, entry: Entry, module: str) -> Tensor:
    """Float values to blocks; UserError for values that the type cannot hold."""
    planned, name = entry.planned, f"{module}.{entry.target.part}"
    largest = x.abs().max().item()
    if not largest < float("inf"):
        raise UserError(f"tensor '{name}' holds NaN or infinite values")
    if largest > HALF_MAX and planned.codec not in (F32, BF16):
        raise UserError(
            f"tensor '{name}' reaches {largest:.3g}, beyond float16's {HALF_MAX:g} that "
            f"{planned.codec.name} relies on; export as BF16"
        )
    importance = entry.importance
    if importance is not None:
        importance = importance[entry.modules.index(module)]
    return planned.codec.encode(x.reshape(-1, planned.shape[-1]), importance)


def _check_shape(x: Tensor, entry: Entry, module: str) -> None:
    expected = entry.target.module_shape
    if tuple(x.shape) != expected:
        raise UserError(
            f"tensor '{module}.{entry.target.part}' has shape {tuple(x.shape)}, config.json means "
            f"{expected}"
        )
