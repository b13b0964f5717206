"""The one definition of affine (integer) quantize and dequantize.

value ~ (code - zero_point) * scale, with signed codes in [qmin, qmax] = [-2^(b-1), 2^(b-1) - 1] and
a zero-point in the same range (None: 0). This is the domain of compressed-tensors; layouts that
store unsigned codes add 2^(b-1) when they pack. Scales and zero-points hold one entry per group of
consecutive input columns: [out, groups]. A per-channel scale is [out, 1], a per-tensor one [1, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor


def code_range(num_bits: int) -> tuple[int, int]:
    """Smallest and largest signed code of `num_bits`."""
    return -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1


def expand_groups(qparam: Tensor, columns: int) -> Tensor:
    """[out, groups] to [out, columns]: each group's entry repeated over its columns.

    `groups` divides `columns`, or is 1 and broadcasts as it is.
    """
    groups = qparam.shape[-1]
    if groups == 1:
        return qparam
    assert columns % groups == 0, (columns, groups)
    return qparam.repeat_interleave(columns // groups, dim=-1)


def quantize_affine(w: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int) -> Tensor:
    """w [out, in] float to int8 codes [out, in]; rounds half to even, clamps to the code range.

    Math in float32 whatever the dtypes of `w` and `scale` are.
    """
    columns = w.shape[-1]
    zero = None if zero_point is None else expand_groups(zero_point.float(), columns)
    return round_to_codes(
        w.float(), expand_groups(scale.float(), columns), zero, code_range(num_bits)
    ).to(torch.int8)


def dequantize_affine(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """int8 codes [out, in] to values [out, in]: computed in float32, rounded once to `dtype`."""
    columns = codes.shape[-1]
    zero = None if zero_point is None else expand_groups(zero_point.float(), columns)
    return values_of_codes(codes.float(), expand_groups(scale.float(), columns), zero).to(dtype)


def round_to_codes(
    w: Tensor, scale: Tensor, zero_point: Tensor | None, codes: tuple[int, int]
) -> Tensor:
    """The rounding itself, all float32 of one shape (or broadcasting): whole numbers in `codes`."""
    q = (w / scale).round_()
    if zero_point is not None:
        q.add_(zero_point)
    return q.clamp_(*codes)


def values_of_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """What float32 codes stand for, all of one shape (or broadcasting)."""
    return (codes if zero_point is None else codes - zero_point) * scale
