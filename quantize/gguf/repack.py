"""Quantized weights to GGUF blocks without a second rounding.

GGUF's `_0` types hold d * level with small integer levels, the `_1` types d * q + m. Codes of a
compressed-tensors weight are (code - zero_point) * scale, so wherever the levels fit and scale
groups end where blocks end, the codes carry over as they are and scales only become float16. A
group of 64 or 128 is 2 or 4 blocks with the same scale; a per-channel scale is repeated likewise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.affine import expand_groups
from ..quantized import Quantized
from ..spec import QuantSpec
from .blocks import Codec
from .blocks.legacy import AffineCodec, SymmetricCodec


def can_repack(spec: QuantSpec, columns: int, codec: type[Codec]) -> bool:
    """Whether every weight stored by `spec` fits `codec`, whatever its codes are."""
    if spec.type != "int" or spec.block or not _aligned(columns, spec.groups(columns), codec.block):
        return False
    if issubclass(codec, AffineCodec):
        return (1 << spec.num_bits) - 1 <= codec.high
    if issubclass(codec, SymmetricCodec):
        return spec.symmetric and 1 << (spec.num_bits - 1) <= -codec.low
    return False


def repack(q: Quantized, codec: type[Codec]) -> Tensor | None:
    """Blocks uint8 [out, bytes] with q's own codes, None where they do not fit `codec`."""
    rows, columns = q.codes.shape
    groups = q.scale.shape[-1]
    if q.spec.type != "int" or not _aligned(columns, groups, codec.block):
        return None
    zero = q.zero_point.int() if q.zero_point is not None else torch.zeros(1, 1, dtype=torch.int32)
    d = _per_block(q.scale, rows, columns // codec.block).to(torch.float16).float()
    if issubclass(codec, SymmetricCodec):
        levels = q.codes - expand_groups(zero, rows, columns)
        if levels.min() < codec.low or levels.max() > codec.high:
            return None
        blocks = codec.pack(d, levels.to(torch.int8).view(-1, codec.block))
    elif issubclass(codec, AffineCodec):
        offset = 1 << (q.spec.num_bits - 1)
        if 2 * offset - 1 > codec.high:
            return None
        m = -d * _per_block(zero + offset, rows, columns // codec.block)
        blocks = codec.pack(d, m, (q.codes + offset).view(-1, codec.block))
    else:
        return None
    return blocks.view(rows, codec.row_bytes(columns))


def _aligned(columns: int, groups: int, block: int) -> bool:
    """Whether scale groups are whole blocks."""
    return columns % block == 0 and (groups == 1 or columns // groups % block == 0)


def _per_block(qparam: Tensor, rows: int, blocks: int) -> Tensor:
    """[rows or 1, groups] to float32 [rows * blocks, 1]: the entry of each block's group."""
    each = qparam.float().expand(rows, -1).repeat_interleave(blocks // qparam.shape[-1], dim=-1)
    return each.reshape(-1, 1)
