"""Choose scales and zero-points: the plain range of a group, or the one with the least error.

The search minimizes sum_j h_j (w_j - dequantize(quantize(w_j)))^2 over a group's columns, with h the
diagonal of the layer's Hessian (the mean square of each input column): an input that is always small
may be rounded badly. It tries shrunken ranges on a grid, and for symmetric formats both signs of the
scale, since codes reach one step further down than up and a negative scale puts that step on the
positive side (as llama.cpp's Q4_0 and AutoRound do); then it refits the scale to the codes by least
squares. Scales are rounded to the dtype that stores them before their error is counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.affine import code_range
from .spec import Channel, Group, QuantSpec, TensorWise

SHRINK_GRID = tuple(1.0 - 0.05 * i for i in range(10))  # share of the full range that is kept
REFITS = 2
CHUNK_ELEMENTS = 1 << 18  # elements of a row chunk: keeps the search's temporaries in cache


class QParams(NamedTuple):
    """scale [out, groups] in its stored dtype; zero_point int8 [out, groups] or None (symmetric)."""

    scale: Tensor
    zero_point: Tensor | None


def grouped(w: Tensor, spec: QuantSpec) -> Tensor:
    """w [out, in] as [rows, groups, size] by `spec`'s granularity (a tensor is one row)."""
    match spec.granularity:
        case Group(size):
            assert w.shape[1] % size == 0, (tuple(w.shape), size)
            return w.reshape(w.shape[0], -1, size)
        case Channel():
            return w.unsqueeze(1)
        case TensorWise():
            return w.reshape(1, 1, -1)
    raise AssertionError(f"weights have no granularity {spec.granularity}")


def choose_qparams(
    w: Tensor, spec: QuantSpec, scale_dtype: torch.dtype, importance: Tensor | None = None
) -> QParams:
    """Scales (and zero-points) for the weight w [out, in].

    importance: float [in], at least 0, one entry an input column: searches for the least weighted
    squared error. None: the plain minimum-maximum range (round to nearest).
    """
    groups = grouped(w.float(), spec)
    if importance is None:
        return _minmax(groups, spec, scale_dtype)
    h = grouped(importance.float().expand(1, -1), spec)
    rows_a_chunk = max(1, CHUNK_ELEMENTS // (groups.shape[1] * groups.shape[2]))
    search = _search_symmetric if spec.symmetric else _search_asymmetric
    parts = [search(g, h, spec.num_bits, scale_dtype) for g in groups.split(rows_a_chunk)]
    zero_points = [p.zero_point for p in parts if p.zero_point is not None]
    return QParams(
        torch.cat([p.scale for p in parts]), torch.cat(zero_points) if zero_points else None
    )


def _minmax(groups: Tensor, spec: QuantSpec, scale_dtype: torch.dtype) -> QParams:
    qmin, qmax = code_range(spec.num_bits)
    if spec.symmetric:
        scale = groups.abs().amax(-1) / ((qmax - qmin) / 2)
        return QParams(_storable(scale, scale_dtype), None)
    low = groups.amin(-1).clamp_(max=0)
    high = groups.amax(-1).clamp_(min=0)
    return _from_range(low, high, qmin, qmax, scale_dtype)


def _from_range(
    low: Tensor, high: Tensor, qmin: int, qmax: int, scale_dtype: torch.dtype
) -> QParams:
    """Asymmetric scale and zero-point whose codes span [low, high], which contains zero."""
    scale = _storable((high - low) / (qmax - qmin), scale_dtype)
    zero = (qmin - low / scale.float()).round_().clamp_(qmin, qmax)
    return QParams(scale, zero.to(torch.int8))


def _storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` in the dtype that stores it; never zero (an all-zero group gets 1), never subnormal."""
    tiny = torch.finfo(dtype).tiny
    magnitude = scale.abs().clamp_(min=tiny, max=torch.finfo(dtype).max)
    signed = torch.where(scale < 0, -magnitude, magnitude)
    return torch.where(scale == 0, torch.ones_like(scale), signed).to(dtype)


def _search_symmetric(
    groups: Tensor, h: Tensor, num_bits: int, scale_dtype: torch.dtype
) -> QParams:
    qmin, qmax = code_range(num_bits)
    top = groups.amax(-1)
    bottom = groups.amin(-1)
    # the range's longer side goes to the code qmin: a positive scale when it is the negative side
    longer = torch.where(top > -bottom, top, bottom)
    best = _Best(groups, h)
    for share in SHRINK_GRID:
        for scale in (longer * (share / qmin), longer * (share / -qmax)):
            scale = _storable(scale, scale_dtype)
            best.offer(scale, None, _codes(groups, scale, None, qmin, qmax))
    best.refit(qmin, qmax, scale_dtype)
    return QParams(best.scale, None)


def _search_asymmetric(
    groups: Tensor, h: Tensor, num_bits: int, scale_dtype: torch.dtype
) -> QParams:
    qmin, qmax = code_range(num_bits)
    low = groups.amin(-1).clamp_(max=0)
    high = groups.amax(-1).clamp_(min=0)
    best = _Best(groups, h)
    for share in SHRINK_GRID:
        scale, zero = _from_range(low * share, high * share, qmin, qmax, scale_dtype)
        assert zero is not None
        best.offer(scale, zero, _codes(groups, scale, zero, qmin, qmax))
    best.refit(qmin, qmax, scale_dtype)
    assert best.zero_point is not None
    return QParams(best.scale, best.zero_point)


def _codes(
    groups: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int
) -> Tensor:
    """Centred codes (code - zero_point) as float [rows, groups, size]."""
    q = (groups / scale.float().unsqueeze(-1)).round_()
    if zero_point is None:
        return q.clamp_(qmin, qmax)
    z = zero_point.float().unsqueeze(-1)
    return torch.minimum(torch.maximum(q, qmin - z), qmax - z)


class _Best:
    """The best scale seen for each group, by weighted squared error."""

    def __init__(self, groups: Tensor, h: Tensor) -> None:
        self.groups, self.h = groups, h
        self.error: Tensor | None = None
        self.scale: Tensor
        self.zero_point: Tensor | None = None

    def offer(self, scale: Tensor, zero_point: Tensor | None, codes: Tensor) -> None:
        difference = torch.addcmul(self.groups, codes, scale.float().unsqueeze(-1), value=-1)
        error = difference.square_().mul_(self.h).sum(-1)
        if self.error is None:
            self.error, self.scale, self.zero_point = error, scale.clone(), zero_point
            return
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if zero_point is not None and self.zero_point is not None:
            self.zero_point = torch.where(better, zero_point, self.zero_point)

    def refit(self, qmin: int, qmax: int, scale_dtype: torch.dtype) -> None:
        """Least-squares scale for the best codes: sum h q w / sum h q^2; kept where it is better."""
        for _ in range(REFITS):
            codes = _codes(self.groups, self.scale, self.zero_point, qmin, qmax)
            weighted = codes * self.h
            norm = (weighted * codes).sum(-1)
            fitted = (weighted * self.groups).sum(-1) / norm
            scale = torch.where(norm > 0, fitted, self.scale.float())
            scale = _storable(scale, scale_dtype)
            self.offer(scale, self.zero_point, _codes(self.groups, scale, self.zero_point, qmin, qmax))
