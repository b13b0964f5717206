"""Choose scales and zero-points: the plain range of a group, or the one with the least error.

The search minimizes sum_j h_j (w_j - dequantize(quantize(w_j)))^2 over a group's columns, with h
the diagonal of the layer's Hessian (the mean square of each input column; all ones without data):
an input that is always small may be rounded badly. It tries shrunken ranges on a grid, and for
symmetric integer formats both signs of the scale, since codes reach one step further down than up
and a negative scale puts that step on the positive side (as llama.cpp's Q4_0 and AutoRound do). The
scale is refitted to the codes by least squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.affine import stored_scale_value
from ..kernels.elements import E4M3, E4M3_MAX, E8M0_BIAS, Elements, mx_exponents
from ..kernels.errors import UserError
from ..kernels.finite import all_finite
from .quantized import elements
from .spec import Block, Channel, Group, QuantSpec, TensorWise

SHRINK_GRID = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52)  # share of the full range that is kept
FLOAT_SHRINK_GRID = (1.15, 1.08, 1.0, 0.92, 0.85, 0.78, 0.7, 0.62)  # floats have finer low steps
# E4M3's relative error repeats with every power of two: what counts is where in an octave most of
# the energy lies, and there is no need to clip
OCTAVE_GRID = tuple(2 ** (i / 16) for i in range(16))
REFITS = 2
CHUNK_ELEMENTS = 1 << 18  # elements of a row chunk: keeps the search's temporaries in cache


class QParams(NamedTuple):
    """scale and zero_point as `Quantized` holds them; global_scale too."""

    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None = None

    def float_scale(self) -> Tensor:
        return stored_scale_value(self.scale, self.global_scale)


class ScaleStore(NamedTuple):
    """How scales are stored: in `dtype`, and what they are divided by before (NVFP4)."""

    dtype: torch.dtype
    global_scale: Tensor | None = None

    def encode(self, scale: Tensor) -> Tensor:
        """float32 scales as they are stored. Never zero (a group of zeros gets 1) or subnormal."""
        if self.dtype == torch.uint8:
            exponent = torch.log2(scale.abs().clamp_(min=2.0**-E8M0_BIAS)).round_()
            stored = exponent.add_(E8M0_BIAS).clamp_(0, 254).to(torch.uint8)
            return torch.where(scale == 0, E8M0_BIAS, stored).to(torch.uint8)
        if self.global_scale is not None:
            scaled = (scale * self.global_scale).clamp_(max=E4M3_MAX)
            tiny = torch.finfo(torch.float8_e4m3fn).smallest_normal
            return torch.where(scale == 0, 1.0, scaled.clamp_(min=tiny)).to(self.dtype)
        info = torch.finfo(self.dtype)
        magnitude = scale.abs().clamp_(min=info.tiny, max=info.max)
        signed = torch.where(scale < 0, -magnitude, magnitude)
        return torch.where(scale == 0, torch.ones_like(scale), signed).to(self.dtype)

    def round(self, scale: Tensor) -> Tensor:
        """The float32 values that storing `scale` leaves."""
        return stored_scale_value(self.encode(scale), self.global_scale)


def scale_store(w: Tensor, spec: QuantSpec, model_dtype: torch.dtype) -> ScaleStore:
    """How the scales of w [out, in] are stored; model_dtype: what "model" means."""
    match spec.scale_dtype:
        case "e8m0":
            return ScaleStore(torch.uint8)
        case "e4m3":
            peak = w.abs().amax().float().clamp_(min=1e-12)
            whole = (E4M3_MAX * elements(spec).highest / peak).clamp_(max=torch.finfo().max)
            return ScaleStore(torch.float8_e4m3fn, whole.reshape(1))
    return ScaleStore(model_dtype)


def grouped(w: Tensor, spec: QuantSpec) -> Tensor:
    """w [out, in] as [rows, groups, size] by `spec`'s granularity (a tensor is one row; a block is
    one group of a row of blocks, cut ones filled up with zeros)."""
    match spec.granularity:
        case Group(size):
            assert w.shape[1] % size == 0, (tuple(w.shape), size)
            return w.reshape(w.shape[0], -1, size)
        case Channel():
            return w.unsqueeze(1)
        case TensorWise():
            return w.reshape(1, 1, -1)
        case Block(rows, columns):
            padded = F.pad(w, (0, -w.shape[1] % columns, 0, -w.shape[0] % rows))
            high, wide = padded.shape[0] // rows, padded.shape[1] // columns
            blocks = padded.reshape(high, rows, wide, columns).transpose(1, 2)
            return blocks.reshape(high, wide, rows * columns)
    raise AssertionError(f"weights have no granularity {spec.granularity}")


def choose_qparams(
    w: Tensor,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    store: ScaleStore | None = None,
) -> QParams:
    """Scales (and zero-points) for the weight w [out, in]; UserError when it is not all finite.

    importance: float [in], at least 0, one entry an input column: searches for the least weighted
    squared error. None: the plain minimum-maximum range (round to nearest). scale_dtype: the
    model's. store: given where w is part of a larger weight whose scales are stored alike.
    """
    w = w.float()
    if not all_finite(w):
        raise UserError("the weight holds NaN or infinite values: the model is damaged")
    store = store or scale_store(w, spec, scale_dtype)
    groups = grouped(w, spec)
    if importance is None:
        return _minmax(groups, spec, store)
    one_row = spec.granularity in (TensorWise(),) or isinstance(spec.granularity, Block)
    h = grouped(importance.float().expand(len(w) if one_row else 1, -1), spec)
    rows_a_chunk = max(1, CHUNK_ELEMENTS // (groups.shape[1] * groups.shape[2]))
    search = _search_symmetric if spec.symmetric else _search_asymmetric
    pieces = h.split(rows_a_chunk) if len(h) > 1 else [h] * -(-len(groups) // rows_a_chunk)
    parts = [
        search(g, piece, elements(spec), store)
        for g, piece in zip(groups.split(rows_a_chunk), pieces, strict=True)
    ]
    zero_points = [p.zero_point for p in parts if p.zero_point is not None]
    return QParams(
        torch.cat([p.scale for p in parts]),
        torch.cat(zero_points) if zero_points else None,
        store.global_scale,
    )


def uniform_importance(w: Tensor) -> Tensor:
    """The importance that makes the search minimize plain squared error: no data is at hand."""
    return w.new_ones(w.shape[1], dtype=torch.float32)


def _minmax(groups: Tensor, spec: QuantSpec, store: ScaleStore) -> QParams:
    codes = elements(spec)
    if spec.symmetric:
        half = codes.highest if spec.type == "float" else (codes.highest - codes.lowest) / 2
        peak = groups.abs().amax(-1)
        return QParams(
            store.encode(_full_scale(peak, half, codes, store)), None, store.global_scale
        )
    low = groups.amin(-1).clamp_(max=0)
    high = groups.amax(-1).clamp_(min=0)
    return _from_range(low, high, codes, store)


def _full_scale(peak: Tensor, half: float, codes: Elements, store: ScaleStore) -> Tensor:
    """The scale that puts `peak` at the end of the range, or near it as a power of two."""
    if store.dtype != torch.uint8:
        return peak / half
    return torch.where(peak > 0, torch.exp2(mx_exponents(peak, codes)), 0.0)


def _from_range(low: Tensor, high: Tensor, codes: Elements, store: ScaleStore) -> QParams:
    """Asymmetric scale and zero-point whose codes span [low, high], which contains zero."""
    scale = store.encode((high - low) / (codes.highest - codes.lowest))
    zero = (codes.lowest - low / scale.float()).round_().clamp_(codes.lowest, codes.highest)
    return QParams(scale, zero.to(torch.int8))


def _search_symmetric(groups: Tensor, h: Tensor, codes: Elements, store: ScaleStore) -> QParams:
    top = groups.amax(-1)
    bottom = groups.amin(-1)
    search = _Search(groups, h, codes, store, None)
    if codes.lowest == -codes.highest:
        peak = torch.maximum(top, -bottom)
        for share in _float_grid(codes, store):
            search.offer(store.round(peak * (share / codes.highest)))
        if store.dtype == torch.uint8:
            search.offer(store.round(_full_scale(peak, codes.highest, codes, store)))
        return QParams(search.refit(), None)
    # the range's longer side goes to the code qmin: a positive scale when it is the negative side
    longer = torch.where(top > -bottom, top, bottom)
    search.offer(store.round(longer.abs() / ((codes.highest - codes.lowest) / 2)))  # the plain one
    for share in SHRINK_GRID:
        for scale in (longer * (share / codes.lowest), longer * (share / -codes.highest)):
            search.offer(store.round(scale))
    return QParams(search.refit(), None)


def _float_grid(codes: Elements, store: ScaleStore) -> tuple[float, ...]:
    """Shares of the range that are tried. By a power of two E4M3 moves to numbers as dense."""
    if codes is E4M3:
        return (1.0,) if store.dtype == torch.uint8 else OCTAVE_GRID
    return FLOAT_SHRINK_GRID


def _search_asymmetric(groups: Tensor, h: Tensor, codes: Elements, store: ScaleStore) -> QParams:
    low = groups.amin(-1).clamp_(max=0)
    high = groups.amax(-1).clamp_(min=0)
    search = _Search(groups, h, codes, store, torch.zeros_like(low))
    for share in SHRINK_GRID:
        scale, zero, _ = _from_range(low * share, high * share, codes, store)
        search.offer(scale.float(), zero)
    scale = search.refit()
    assert search.zero_point is not None
    return QParams(scale, search.zero_point.to(torch.int8))


class _Search:
    """The scale of each group whose codes fit the group best.

    With q the centred codes (code - zero_point) that a candidate gives, the best scale for them is
    s = sum(h w q) / sum(h q^2), which leaves the error sum(h w^2) - sum(h w q)^2 / sum(h q^2): so
    candidates are ranked by the last term, as if each were refitted, and the winner is. Where
    scales are stored coarsely (8 bits), a refitted scale is not what is stored: candidates are then
    ranked by the error that they leave themselves.
    """

    def __init__(
        self,
        groups: Tensor,
        h: Tensor,
        codes: Elements,
        store: ScaleStore,
        zero_point: Tensor | None,
    ) -> None:
        self._groups, self._h, self._codes, self._store = groups, h, codes, store
        self._coarse = store.dtype.itemsize == 1
        self._weighted = groups * h
        self._gain = groups.new_full(groups.shape[:2], -torch.inf)
        self._scale = torch.zeros_like(self._gain)
        self.zero_point = zero_point

    def offer(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Keep the candidate (as it is stored) in the groups in which it is the best so far."""
        zero = None if zero_point is None else zero_point.float()
        fitted, gain, own_gain = self._fit(scale, zero)
        if self._coarse:
            self._keep(scale, own_gain, zero)
            refitted = self._store.round(fitted)
            self._keep(refitted, self._fit(refitted, zero)[2], zero)
        else:
            self._keep(fitted, gain, zero)

    def refit(self) -> Tensor:
        """The best scales [rows, groups] as they are stored.

        Rounding anew with a refitted scale and refitting again never makes the error larger.
        """
        if not self._coarse:
            for _ in range(REFITS):
                self._scale = self._fit(self._store.round(self._scale), self.zero_point)[0]
        return self._store.encode(self._scale)

    def _keep(self, scale: Tensor, gain: Tensor, zero: Tensor | None) -> None:
        better = gain > self._gain
        self._gain = torch.where(better, gain, self._gain)
        self._scale = torch.where(better, scale, self._scale)
        if zero is not None:
            assert self.zero_point is not None
            self.zero_point = torch.where(better, zero, self.zero_point)

    def _fit(self, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The least-squares scale for the codes that `scale` gives, the error that it removes, and
        the error that `scale` itself removes."""
        q = self._groups * scale.reciprocal().unsqueeze(-1)
        if zero_point is None:
            q = self._codes.snap_(q)
        else:
            zero = zero_point.unsqueeze(-1)
            q.round_()
            q = torch.maximum(q, self._codes.lowest - zero, out=q)
            q = torch.minimum(q, self._codes.highest - zero, out=q)
        product = torch.linalg.vecdot(q, self._weighted)
        norm = (
            torch.linalg.vecdot(q.square_(), self._h)
            if len(self._h) > 1
            else torch.einsum("rgk,gk->rg", q.square_(), self._h[0])
        )
        fitted = torch.where(norm > 0, product / norm, scale)
        gain = torch.where(norm > 0, product * fitted, 0.0)
        return fitted, gain, scale * (2 * product - scale * norm)
