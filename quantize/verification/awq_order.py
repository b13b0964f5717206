"""Whether AWQ's words hold their eight outputs in AWQ's order or in plain order, by statistics.

Nothing in the file says it. But a row's group spans its codes' range whatever its spread is, so its
scale is in proportion to its largest weight, and the spread of its codes to the usual weight over
the largest: where outliers made the scale large, codes are narrow. Rows that are told apart within
a word therefore show a negative correlation between the logarithms of both, and rows that have been
mixed up show none. Zero-points are at the codes' mean, since weights are about zero on average.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.layouts.awq import ORDER
from ..quantized import Quantized

EIGHT = 8
STANDARD_ERRORS = 8.0  # by which plain order must fit better
LEAST = 0.05  # a correlation that says something


class Sums(NamedTuple):
    """Sums of products of residuals: what correlations over several linears are made of.

    codes: of the spread of codes (in AWQ's and in plain order) with scales. zeros: of zero-points
    (in both orders) with the codes' mean, for codes in AWQ's and in plain order.
    """

    count: int
    codes: Tensor  # float64 [2]
    zeros: Tensor  # float64 [2, 2]: codes' order, zero-points' order


class Orders(NamedTuple):
    """Which tensors are in plain order, by what the statistics say; False: in AWQ's, or unclear."""

    qweight: bool
    qzeros: bool


def order_sums(q: Quantized) -> Sums | None:
    """The sums of one linear that was read in AWQ's order, each normed to its own spread; None
    where it has too little to tell."""
    rows, columns = q.codes.shape
    groups = q.scale.shape[1]
    grouped = q.codes.view(rows, groups, columns // groups).double()
    spread = grouped.std(-1, correction=0)
    scale = q.scale.double().abs()
    usable = bool(((spread > 0) & (scale > 0)).float().mean() > 0.9)
    if not usable or columns // groups < EIGHT:
        return None
    spread, scale = spread.clamp_min(1e-3).log(), scale.clamp_min(1e-12).log()
    both = [_residuals(t) for t in (spread, _plain(spread))]
    scale = _residuals(scale)
    means = [_residuals(t) for t in (grouped.mean(-1), _plain(grouped.mean(-1)))]
    zero = torch.zeros_like(scale) if q.zero_point is None else q.zero_point.double()
    zeros = [_residuals(t) for t in (zero, _plain(zero))]
    return Sums(
        scale.numel(),
        torch.stack([(s * scale).sum() for s in both]),
        torch.stack([torch.stack([(m * z).sum() for z in zeros]) for m in means]),
    )


def judge(sums: list[Sums]) -> Orders:
    """What the linears say together."""
    count = sum(s.count for s in sums)
    if not count:
        return Orders(False, False)
    margin = STANDARD_ERRORS / math.sqrt(count)
    awq, plain = (torch.stack([s.codes for s in sums]).sum(0) / count).tolist()
    codes = plain < awq - margin and plain < -LEAST
    zeros = (torch.stack([s.zeros for s in sums]).sum(0) / count)[int(codes)].tolist()
    return Orders(codes, zeros[1] > zeros[0] + margin and zeros[1] > LEAST)


def _plain(x: Tensor) -> Tensor:
    """Rows [out, groups] as they are if the words were filled in plain order."""
    return x.view(-1, EIGHT, x.shape[-1])[:, list(ORDER)].reshape(x.shape)


def _residuals(x: Tensor) -> Tensor:
    """[out, groups] less the mean of each word's eight rows, scaled to a mean square of one."""
    eights = x.view(-1, EIGHT, x.shape[-1])
    left = (eights - eights.mean(1, keepdim=True)).reshape(x.shape)
    return left / left.square().mean().sqrt().clamp_min(1e-12)
