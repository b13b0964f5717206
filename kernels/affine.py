"""The one definition of quantize and dequantize.

value ~ (code - zero_point) * scale, with codes among a format's elements (kernels/elements.py):
signed whole numbers, which may have a zero-point in the same range (None: 0), or small floats,
which have none. This is the domain of compressed-tensors; layouts that store unsigned codes add
2^(b-1) when they pack. Scales and zero-points hold one entry per group of consecutive input
columns: [out, groups]. A per-channel scale is [out, 1], a per-tensor one [1, 1], one per block of
m x n is [ceil(out/m), ceil(in/n)]. Where columns do not lie in the order of their groups, g_idx
[in] names each column's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elements import E8M0_BIAS, Elements, int_elements


def expand_groups(
    qparam: Tensor,
    rows: int,
    columns: int,
    block: tuple[int, int] | None = None,
    g_idx: Tensor | None = None,
) -> Tensor:
    """A qparam [out, groups] with each entry repeated over its columns, to [out, columns].

    An axis of size 1 broadcasts as it is. block: rows and columns that share an entry, where the
    last block of either axis may be cut. g_idx: int [columns], the group of each column; None:
    groups are runs of columns.
    """
    if g_idx is not None:
        assert block is None and len(g_idx) == columns, (block, g_idx.shape, columns)
        return qparam.index_select(1, g_idx)
    if block is not None:
        over_rows = qparam.repeat_interleave(block[0], dim=0)[:rows]
        return over_rows.repeat_interleave(block[1], dim=1)[:, :columns]
    groups = qparam.shape[-1]
    if groups == 1:
        return qparam
    assert columns % groups == 0, (columns, groups)
    return qparam.repeat_interleave(columns // groups, dim=-1)


def quantize_affine(
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    elements: Elements | int,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """w [out, in] float to codes [out, in] in the elements' dtype (an int: that many bits).

    Math in float32 whatever the dtypes of `w` and `scale` are.
    """
    if isinstance(elements, int):
        elements = int_elements(elements)
    rows, columns = w.shape[-2:]
    zero = None if zero_point is None else expand_groups(zero_point.float(), rows, columns, block)
    expanded = expand_groups(scale.float(), rows, columns, block)
    return round_to_codes(w.float(), expanded, zero, elements).to(elements.dtype)


def dequantize_affine(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype = torch.float32,
    block: tuple[int, int] | None = None,
    g_idx: Tensor | None = None,
) -> Tensor:
    """Codes [out, in] to values [out, in]: computed in float32, rounded once to `dtype`.

    block, g_idx: which columns share a scale, see `expand_groups`.
    """
    rows, columns = codes.shape[-2:]
    zero = None
    if zero_point is not None:
        zero = expand_groups(zero_point.float(), rows, columns, block, g_idx)
    expanded = expand_groups(scale.float(), rows, columns, block, g_idx)
    return values_of_codes(codes.float(), expanded, zero).to(dtype)


def round_to_codes(
    w: Tensor, scale: Tensor, zero_point: Tensor | None, elements: Elements
) -> Tensor:
    """The rounding itself, all float32 of one shape (or broadcasting): elements, as float32."""
    q = w / scale
    if zero_point is None:
        return elements.snap_(q)
    return q.round_().add_(zero_point).clamp_(elements.lowest, elements.highest)


def stored_scale_value(scale: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """What a stored scale is worth, float32.

    uint8: an exponent (E8M0, 127 is one); float8_e4m3fn beside a global_scale float32 [1]: to be
    divided by that; any other float as it is.
    """
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - E8M0_BIAS)
    return scale.float() if global_scale is None else scale.float() / global_scale


def values_of_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """What float32 codes stand for, all of one shape (or broadcasting)."""
    return (codes if zero_point is None else codes - zero_point) * scale
