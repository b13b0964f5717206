"""HQQ: half-quadratic quantization (Badri & Shaji 2023, mobiusml.github.io/hqq_blog), data-free.

Weights have outliers, and a squared error lets them set a group's range. HQQ minimizes
sum |w - w^|^p with p at most 1, which cares for the many and lets a few be wrong. The norm is split
off into a variable e that takes what may be wrong (half-quadratic splitting), x = w - w^:

    e <- sign(x) max(|x| - |x|^(p-1) / beta, 0)
    scale, zero-point <- least squares of w - e on the codes

with beta growing from step to step. Here errors are measured in steps of the first scale, so that p
and beta mean the same for every weight; both the scale and the zero-point are fitted (the paper
fits the zero-point); symmetric formats fit the scale alone. The zero-point is a whole number in the
end, as checkpoints store it: it is rounded, and the scale fitted again to the codes that this
gives. The descent starts from the whole range and finds the minimum next to it, which is wanted:
there are others at narrower ranges that cut outliers off (docs/log.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.affine import quantize_affine
from ...kernels.elements import Elements
from ...kernels.errors import UserError
from ..quantized import Quantized, elements
from ..ranges import CHUNK_ELEMENTS, ScaleStore, grouped, scale_store
from ..spec import Block, QuantSpec, TensorWise
from .settings import HQQSettings

BETA, BETA_GROWTH = 10.0, 1.05
LEAST_ERROR = 1e-4  # in steps: below it |x|^(p-1) would grow without bound
INTEGER_REFITS = 3  # fits of the scale once the zero-point is a whole number


class _Fit(NamedTuple):
    """scale and zero (float32 [rows, groups, 1]) of each group and its error, the same shape."""

    scale: Tensor
    zero: Tensor
    error: Tensor


def hqq_quantize(
    w: Tensor, spec: QuantSpec, scale_dtype: torch.dtype, settings: HQQSettings
) -> Quantized:
    """Quantize w [out, in] (any float dtype) to integer codes; scales stored in `scale_dtype`.

    UserError for float formats, whose elements are not evenly spaced, and for non-finite weights.
    """
    if spec.type != "int" or isinstance(spec.granularity, Block | TensorWise):
        raise UserError(
            f"hqq quantizes to integers in groups or channels, not {spec.type} {spec.granularity}; "
            "take rtn or gptq"
        )
    if not torch.isfinite(w).all():
        raise UserError("the weight holds NaN or infinite values: the model is damaged")
    store = scale_store(w, spec, scale_dtype)
    groups = grouped(w.float(), spec)
    rows = max(1, CHUNK_ELEMENTS // (groups.shape[1] * groups.shape[2]))
    fits = [_descend(g, spec, store, settings) for g in groups.split(rows)]
    scale = store.encode(torch.cat([f.scale for f in fits]).squeeze(-1))
    zero = None
    if not spec.symmetric:
        zero = torch.cat([f.zero for f in fits]).squeeze(-1).to(torch.int8)
    codes = quantize_affine(w, scale.float(), zero, elements(spec))
    return Quantized(codes, scale, zero, spec)


def _descend(w: Tensor, spec: QuantSpec, store: ScaleStore, settings: HQQSettings) -> _Fit:
    """The half-quadratic iteration for w [rows, groups, size], from each group's whole range, then
    with whole zero-points the fit of the scale alone."""
    codes = elements(spec)
    scale, zero = _whole_range(w, spec.symmetric, codes, store)
    unit, beta = scale.abs(), BETA
    best: _Fit | None = None
    for i in range(settings.iterations + INTEGER_REFITS):
        whole = spec.symmetric or i >= settings.iterations
        if i == settings.iterations and best is not None and not spec.symmetric:
            zero, scale = best.zero.round().clamp_(codes.lowest, codes.highest), best.scale
            best = None
        if whole:
            scale = store.round(scale)
        q = (w / scale).add_(zero).round_().clamp_(codes.lowest, codes.highest)
        difference = (w - (q - zero) * scale) / unit
        magnitude = difference.abs().clamp_(min=LEAST_ERROR)
        slope = magnitude.pow(settings.norm - 1)
        error = (slope * magnitude).sum(-1, keepdim=True)
        best = _better(best, _Fit(scale, zero, error))
        wrong = (magnitude - slope.div_(beta)).clamp_(min=0).copysign_(difference)
        aim = w - wrong.mul_(unit)
        if whole:
            scale = _slope(q - zero, aim, scale)
        else:
            scale, zero = _line(q, aim, scale, zero)
        beta *= BETA_GROWTH
    assert best is not None
    return best


def _whole_range(
    w: Tensor, symmetric: bool, codes: Elements, store: ScaleStore
) -> tuple[Tensor, Tensor]:
    """Scales and zero-points [rows, groups, 1] that span each group's range; symmetric: its longer
    side goes to the code `lowest`, under a negative scale where that is the positive one."""
    low = w.amin(-1, keepdim=True).clamp_(max=0)
    high = w.amax(-1, keepdim=True).clamp_(min=0)
    if symmetric:
        scale = store.round(torch.where(high > -low, high, low) / codes.lowest)
        return scale, torch.zeros_like(scale)
    scale = store.round((high - low) / (codes.highest - codes.lowest))
    return scale, codes.lowest - low / scale


def _better(one: _Fit | None, other: _Fit) -> _Fit:
    """Group by group, the fit of less error."""
    if one is None:
        return other
    take = other.error < one.error
    return _Fit(*(torch.where(take, b, a) for a, b in zip(one, other, strict=True)))


def _slope(q: Tensor, w: Tensor, fallback: Tensor) -> Tensor:
    """s that minimizes sum (w - s q)^2; `fallback` where all q are zero or s would be."""
    norm = q.square().sum(-1, keepdim=True)
    slope = (q * w).sum(-1, keepdim=True) / norm
    return torch.where((norm > 0) & (slope != 0), slope, fallback)


def _line(q: Tensor, w: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """s and z that minimize sum (w - s (q - z))^2; as they are where all q are one."""
    mean_q, mean_w = q.mean(-1, keepdim=True), w.mean(-1, keepdim=True)
    spread = q - mean_q
    slope = _slope(spread, w - mean_w, scale)
    same = spread.square().sum(-1, keepdim=True) == 0
    slope = torch.where(same, scale, slope)
    return slope, torch.where(same, zero, mean_q - mean_w / slope)
