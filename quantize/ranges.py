"""Choose scales and zero-points: the plain range of a group, or the one with the least error.

The search minimizes sum_j h_j (w_j - dequantize(quantize(w_j)))^2 over a group's columns, with h
the diagonal of the layer's Hessian (the mean square of each input column): an input that is always
small may be rounded badly. It tries shrunken ranges on a grid, and for symmetric formats both signs
of the scale, since codes reach one step further down than up and a negative scale puts that step on
the positive side (as llama.cpp's Q4_0 and AutoRound do). The scale is refitted to the codes by
least squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.affine import code_range
from .spec import Channel, Group, QuantSpec, TensorWise

SHRINK_GRID = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52)  # share of the full range that is kept
REFITS = 2
CHUNK_ELEMENTS = 1 << 18  # elements of a row chunk: keeps the search's temporaries in cache


class QParams(NamedTuple):
    """scale [out, groups] in its stored dtype; zero_point int8 [out, groups], None: symmetric."""

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
    """`scale` in the dtype that stores it; never zero (a group of zeros gets 1) or subnormal."""
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
    search = _Search(groups, h, (qmin, qmax), None)
    for share in SHRINK_GRID:
        for scale in (longer * (share / qmin), longer * (share / -qmax)):
            search.offer(_storable(scale, scale_dtype))
    return QParams(search.refit(scale_dtype), None)


def _search_asymmetric(
    groups: Tensor, h: Tensor, num_bits: int, scale_dtype: torch.dtype
) -> QParams:
    qmin, qmax = code_range(num_bits)
    low = groups.amin(-1).clamp_(max=0)
    high = groups.amax(-1).clamp_(min=0)
    search = _Search(groups, h, (qmin, qmax), torch.zeros_like(low))
    for share in SHRINK_GRID:
        scale, zero = _from_range(low * share, high * share, qmin, qmax, scale_dtype)
        search.offer(scale, zero)
    scale = search.refit(scale_dtype)
    assert search.zero_point is not None
    return QParams(scale, search.zero_point.to(torch.int8))


class _Search:
    """The scale of each group whose codes fit the group best.

    With q the centred codes (code - zero_point) that a candidate gives, the best scale for them is
    s = sum(h w q) / sum(h q^2), which leaves the error sum(h w^2) - sum(h w q)^2 / sum(h q^2): so
    candidates are ranked by the last term, as if each were refitted, and the winner is.
    """

    def __init__(
        self, groups: Tensor, h: Tensor, codes: tuple[int, int], zero_point: Tensor | None
    ) -> None:
        self._groups, self._h, self._range = groups, h, codes
        self._weighted = groups * h
        self._gain = groups.new_full(groups.shape[:2], -1.0)
        self._scale = torch.zeros_like(self._gain)
        self.zero_point = zero_point

    def offer(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Keep the candidate in the groups in which it is the best so far."""
        zero = None if zero_point is None else zero_point.float()
        fitted, gain = self._fit(scale.float(), zero)
        better = gain > self._gain
        self._gain = torch.where(better, gain, self._gain)
        self._scale = torch.where(better, fitted, self._scale)
        if zero is not None:
            assert self.zero_point is not None
            self.zero_point = torch.where(better, zero, self.zero_point)

    def refit(self, dtype: torch.dtype) -> Tensor:
        """The best scales [rows, groups] in the dtype that stores them.

        Rounding anew with a refitted scale and refitting again never makes the error larger.
        """
        for _ in range(REFITS):
            self._scale, _ = self._fit(_storable(self._scale, dtype).float(), self.zero_point)
        return _storable(self._scale, dtype)

    def _fit(self, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
        """The least-squares scale for the codes that `scale` gives, and the error it removes."""
        q = (self._groups * scale.reciprocal().unsqueeze(-1)).round_()
        qmin, qmax = self._range
        if zero_point is None:
            q.clamp_(qmin, qmax)
        else:
            zero = zero_point.unsqueeze(-1)
            q = torch.minimum(torch.maximum(q, qmin - zero, out=q), qmax - zero, out=q)
        product = torch.linalg.vecdot(q, self._weighted)
        norm = torch.einsum("rgk,gk->rg", q.square_(), self._h[0])
        fitted = torch.where(norm > 0, product / norm, scale)
        return fitted, torch.where(norm > 0, product * fitted, 0.0)
