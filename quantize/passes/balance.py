"""Per-channel scales of least expected rounding error: the search behind AWQ and SmoothQuant here.

A value that is rounded with step r / n errs by r^2 / (12 n^2) on average, r being the largest
magnitude of its group and n the number of steps that the format has from zero to it. With scales s,
column j of the weight holds w_ij s_j and meets an input of energy H_jj / s_j^2, so the layer's
output errs by

    sum_i sum_g (max_{j in g} |w_ij| s_j)^2 / (12 n^2) * sum_{j in g} H_jj / s_j^2

and, where inputs are rounded too, by the same form with the roles exchanged: inputs x_tj / s_j that
meet columns of energy |w_j|^2 s_j^2. Both are sums of products of exponentials in log s, so their
sum is convex in log s (a geometric program): there is one best scale, and gradient steps find it.
AWQ's and SmoothQuant's formulas (arXiv:2306.00978, arXiv:2211.10438) are curves through this space,
searched by one parameter.

The maximum is replaced by a p-norm, p = 16, so that the gradient reaches every large value, not
the largest alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 60  # of Adam; the start is s = 1
LEARNING_RATE = 0.05
DOUBLINGS = 4  # p = 2^4
MAX_ROWS = 1024  # rows (evenly spaced) that stand for all of a weight's or all tokens
CHUNK_ELEMENTS = 1 << 18  # keeps a step's temporaries in cache


class Rounding(NamedTuple):
    """One operand of a linear that is rounded.

    magnitudes: float32 [rows, groups, size], values before scaling; a group shares a step.
    energy: float32 [in], mean square (or its like) of what each column is multiplied with.
    levels: steps from zero to the largest magnitude.
    divided: whether its columns are divided by the scales (inputs), not multiplied (weights).
    """

    magnitudes: Tensor
    energy: Tensor
    levels: float
    divided: bool = False


def rounding_of(values: Tensor, energy: Tensor, levels: float, divided: bool = False) -> Rounding:
    """A Rounding of values [rows, groups, size], thinned out to MAX_ROWS rows of the same total."""
    stride = -(-len(values) // MAX_ROWS)
    magnitudes = values[::stride].abs().float().contiguous()
    return Rounding(magnitudes, energy.float() * stride, levels, divided)


def balanced_scales(roundings: list[Rounding], columns: Tensor) -> Tensor:
    """The scales float32 [scales] that minimize the summed expected error of `roundings`.

    columns: int64 [in], the scale that each input column takes (equally many share each).
    The geometric mean of the largest and smallest scale is 1.
    """
    count = int(columns.max()) + 1
    log_scale = torch.zeros(count, device=columns.device)
    first, second = torch.zeros_like(log_scale), torch.zeros_like(log_scale)
    for step in range(1, STEPS + 1):
        total, slope = 0.0, torch.zeros_like(log_scale)
        for rounding in roundings:
            sign = -1.0 if rounding.divided else 1.0
            error, by_column = expected_error(rounding, torch.exp(sign * log_scale[columns]))
            total += error
            slope += sign * of_each_scale(by_column, columns).sum(1)
        slope /= max(total, 1e-30)  # of the logarithm: steps do not depend on the weights' size
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope.square()
        rms = (second / (1 - 0.999**step)).sqrt_().add_(1e-8)
        log_scale -= LEARNING_RATE * (first / (1 - 0.9**step)) / rms
    return centred(log_scale.exp())


def expected_error(rounding: Rounding, factors: Tensor) -> tuple[float, Tensor]:
    """The expected error (without the common 1/12) with columns multiplied by `factors` [in], and
    its derivative [in] by their logarithms."""
    groups, size = rounding.magnitudes.shape[1:]
    factors = factors.view(groups, size)
    met = rounding.energy.view(groups, size) / factors.square()
    energy = met.sum(-1)  # of each group
    ranges = torch.zeros_like(energy)  # summed squares of each group's range
    share = torch.zeros_like(factors)  # and how much of it is due to each column
    rows = max(1, CHUNK_ELEMENTS // (groups * size))
    for chunk in rounding.magnitudes.split(rows):
        scaled = chunk * factors
        peak = scaled.amax(-1, keepdim=True).clamp_(min=1e-30)
        powers = scaled.div_(peak)
        for _ in range(DOUBLINGS):
            powers.square_()
        norm = powers.sum(-1, keepdim=True).clamp_(min=1)  # 0 where all values are
        square = peak.square() * norm ** (2 / 2**DOUBLINGS)
        ranges += square.sum((0, 2))
        share += (powers * (square / norm)).sum(0)
    weight = 1 / rounding.levels**2
    slope = 2 * weight * (share * energy.unsqueeze(1) - met * ranges.unsqueeze(1))
    return float((ranges * energy).sum()) * weight, slope.flatten()


def of_each_scale(by_column: Tensor, columns: Tensor) -> Tensor:
    """Values [in] of input columns as [scales, columns that take it], in an order that is the same
    on every device (a scattered sum's would not be)."""
    return by_column[torch.argsort(columns, stable=True)].view(int(columns.max()) + 1, -1)


def centred(scales: Tensor) -> Tensor:
    """`scales` divided by the geometric mean of the largest and the smallest."""
    return scales / (scales.max() * scales.min()).sqrt()
