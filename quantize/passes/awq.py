"""AWQ, activation-aware weight quantization (Lin et al. 2023, arXiv:2306.00978).

Input channels with large activations matter more. Multiplying their weights with s > 1 before
rounding, and dividing the input by s, makes their share of the rounding error smaller, as long as
they do not widen the range of their group. AWQ takes s = mean|x|^ratio, or with duo scaling
mean|x|^ratio / mean|w|^(1 - ratio) where |w| counts in units of its group's largest value, and
tries a grid of ratios against the error that rounding then makes. Afterwards ranges are clipped
where that makes a group's output error smaller.

Errors are measured through second moments H = mean of x x^T, exact for the outputs of linears:
tr((W - Q(W s)/s) H (W - Q(W s)/s)^T). quantize/smoothing.py measures them at a block's output too;
quantize/passes/balance.py finds scales without a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.affine import quantize_affine
from ..quantized import Quantized, elements
from ..ranges import choose_qparams, grouped
from ..spec import Group, QuantSpec
from .balance import centred, of_each_scale
from .settings import AWQSettings

LEAST_SCALE = 1e-4  # before centring
LEAST_CLIP = 0.5  # share of its range that a group keeps at least
ROWS_A_CHUNK = 512

Loss = Callable[[list[Tensor]], float]  # of the weights [out, in] that linears would have


class GridChoice(NamedTuple):
    """scales float32 [scales]; the ratio and whether duo scaling made them; their loss, and that of
    rounding without scales."""

    scales: Tensor
    ratio: float
    duo: bool
    loss: float
    plain_loss: float


def fake_quantize(
    w: Tensor, spec: QuantSpec, scale_dtype: torch.dtype, importance: Tensor | None = None
) -> Tensor:
    """What w [out, in] is worth after rounding to nearest, float32; see `choose_qparams`."""
    p = choose_qparams(w, spec, scale_dtype, importance)
    codes = quantize_affine(w, p.float_scale(), p.zero_point, elements(spec), spec.block)
    return Quantized(codes, p.scale, p.zero_point, spec, p.global_scale).dequantize()


def hessian_loss(originals: list[Tensor], hessian: Tensor) -> Loss:
    """The mean squared error of linears' outputs, summed over outputs: originals [out, in] against
    the weights in their place, under H float32 [in, in]."""

    def loss(weights: list[Tensor]) -> float:
        total = 0.0
        for old, new in zip(originals, weights, strict=True):
            for a, b in zip(old.split(ROWS_A_CHUNK), new.split(ROWS_A_CHUNK), strict=True):
                difference = a - b
                total += float(((difference @ hessian) * difference).sum())
        return total

    return loss


def grid_scales(
    weights: list[Tensor],
    mean_abs: Tensor,
    columns: Tensor,
    spec: QuantSpec,
    settings: AWQSettings,
    quantize: Callable[[Tensor], Tensor],
    loss: Loss,
) -> GridChoice:
    """The scales on AWQ's curves that lose least, for linears that share an input.

    weights: float32 [out, in] each. mean_abs: float32 [in], mean |x| of the input. columns: int64
    [in], the scale that each input column takes. quantize: a weight to what it is worth afterwards.
    """
    x = of_each_scale(mean_abs, columns).mean(1)
    w = of_each_scale(relative_magnitude(weights, spec), columns).mean(1)
    plain_loss = loss([quantize(weight) for weight in weights])
    best = GridChoice(torch.ones_like(x), 0.0, False, plain_loss, plain_loss)
    for ratio, duo, scales in candidates(x, w, settings):
        by_column = scales[columns]
        value = loss([quantize(weight * by_column) / by_column for weight in weights])
        if value < best.loss:
            best = GridChoice(scales, ratio, duo, value, plain_loss)
    return best


def candidates(x: Tensor, w: Tensor, settings: AWQSettings) -> Iterator[tuple[float, bool, Tensor]]:
    """Ratio, whether duo scaling takes part, and scales, for mean magnitudes x and w [scales]."""
    kinds = {"auto": (False, True), "on": (True,), "off": (False,)}[settings.duo_scaling]
    for duo in kinds:
        for step in range(settings.n_grid):
            ratio = step / settings.n_grid
            if ratio == 0 and not duo:
                continue  # no scales
            scales = x**ratio
            if duo:
                scales = scales / (w ** (1 - ratio) + LEAST_SCALE)
            yield ratio, duo, centred(scales.clamp(min=LEAST_SCALE))


def relative_magnitude(weights: list[Tensor], spec: QuantSpec) -> Tensor:
    """Mean over all rows of |w| in units of its group's largest value, float32 [in]."""
    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight in weights:
        groups = _column_groups(weight, spec).abs()
        total += (groups / groups.amax(-1, keepdim=True).clamp_(min=1e-30)).sum(0).flatten()
    return total / sum(map(len, weights))


def clip_weight(
    w: Tensor,
    hessian: Tensor,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
    settings: AWQSettings,
) -> Tensor:
    """w [out, in] with each group's values limited to the share of its range that loses least.

    A group's loss is its own output error under its block of H [in, in]; the range shrinks towards
    zero in n_grid steps to LEAST_CLIP of itself. float32.
    """
    groups = _column_groups(w.float(), spec)
    size = groups.shape[2]
    blocks = torch.stack(
        [h[:, i * size : (i + 1) * size] for i, h in enumerate(hessian.split(size))]
    )
    parts = [
        _clip(rows, blocks, spec, scale_dtype, settings) for rows in groups.split(ROWS_A_CHUNK)
    ]
    return torch.cat(parts).reshape(w.shape)


def _clip(
    groups: Tensor,
    blocks: Tensor,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
    settings: AWQSettings,
) -> Tensor:
    """`clip_weight` for groups [rows, groups, size] and their blocks of H [groups, size, size]."""
    low = groups.amin(-1, keepdim=True).clamp_(max=0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0)
    best, least = groups, groups.new_full(groups.shape[:2], torch.inf)
    for step in range(settings.n_grid):
        share = 1 - (1 - LEAST_CLIP) * step / settings.n_grid
        clipped = torch.minimum(torch.maximum(groups, low * share), high * share)
        value = fake_quantize(clipped.flatten(1), spec, scale_dtype).view_as(groups)
        difference = (value - groups).transpose(0, 1)  # [groups, rows, size]
        loss = (torch.bmm(difference, blocks) * difference).sum(-1).T
        better = loss < least
        least = torch.where(better, loss, least)
        best = torch.where(better.unsqueeze(-1), clipped, best)
    return best


def _column_groups(w: Tensor, spec: QuantSpec) -> Tensor:
    """w [out, in] as [out, groups, size]: what shares a scale along a row, else one group."""
    return grouped(w, spec) if isinstance(spec.granularity, Group) else w.unsqueeze(1)
