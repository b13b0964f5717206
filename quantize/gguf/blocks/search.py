"""The searches for scales: which scale, and which minimum, stores a sub-block with least error.

Sub-blocks lie in columns, x [width, n], so that one operation serves all n of them. The reference
rounds after every float32 operation, and the bytes follow from that: sums are made column by column
(`torch.sum` adds in another order), quotients by true division, weights multiplied from the left.
What the reference tries one after another is tried at once where a trial does not depend on those
before it: trials are then rows of [trials, n], and the best is taken in the reference's order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

EPSILON = 1e-15  # a sub-block whose values are all smaller counts as zero
TINY = 1e-30  # of a sub-block's range: a number of levels divided by less may overflow
ROUNDS = 5  # of coordinate descent
SNAP = 12582912.0  # 1.5 * 2^23: adding it leaves a float32's integer part in its lowest bits


class AffineFit(NamedTuple):
    """value = scale * level - minimum: scale, minimum float32 [n]; levels float32 [width, n]."""

    scale: Tensor
    minimum: Tensor
    levels: Tensor


class Fit(NamedTuple):
    """value = scale * level: scale float32 [n]; levels float32 [width, n]."""

    scale: Tensor
    levels: Tensor


def affine_search(
    x: Tensor, weight: Tensor, high: int, first: float, step: float, trials: int, absolute: bool
) -> AffineFit:
    """The affine grid with levels 0 .. high that stores x [width, n] with least weighted error.

    The first grid spans x with 0; trial i puts the top of x at level high + first + step * i of a
    grid from the best minimum so far, and refits scale and minimum by least squares, the minimum
    held at 0 or above. The error is weight * difference^2, or weight * |difference| if `absolute`.
    """
    low, top = x.amin(0).clamp_(max=0), x.amax(0)
    flat, lowest = top == low, low
    tiny = bool(((top - low) < TINY).any())
    sum_w, sum_x = sum_columns(weight), sum_columns(weight * x)
    inverse = divide(high, top - low)
    scale = 1 / inverse
    levels = affine_levels(x, low, inverse, high, tiny)
    error = affine_error(x, weight, levels, scale, low, absolute)
    best = torch.stack([error, scale, low, inverse, low])  # the last two give the levels
    tops = column([f32(first) + f32(step) * f32(i) + f32(high) for i in range(trials + 1)], x)
    for level in tops:
        least, _, low, _, _ = best
        inverse = level / (top - low)
        levels = affine_levels(x, low, inverse, high, tiny)
        weighted = weight * levels
        sum_l, sum_xl = sum_columns(weighted), sum_columns(weighted * x)
        sum_l2 = sum_columns(weighted.mul_(levels))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = new_low > 0
        if positive.any():
            new_low.masked_fill_(positive, 0)
            scale = torch.where(positive, sum_xl / sum_l2, scale)
        error = affine_error(x, weight, levels, scale, new_low, absolute)
        better = (error < least).logical_and_(determinant > 0)
        best = torch.where(better, torch.stack([error, scale, new_low, inverse, low]), best)
    _, scale, low, inverse, level_low = best
    levels = affine_levels(x, level_low, inverse, high, tiny).masked_fill_(flat, 0)
    return AffineFit(scale.masked_fill(flat, 0), -torch.where(flat, lowest, low), levels)


def affine_levels(x: Tensor, low: Tensor, inverse: Tensor, high: int, tiny: bool) -> Tensor:
    """x [width, n] on grids from `low` whose step is 1 / inverse [n]: the nearest of 0 .. high.

    tiny: some steps may be so small that `inverse` overflows; all their levels are 0.
    """
    if tiny:
        inverse = inverse.masked_fill(inverse.isinf(), 0)
    return (x - low).mul_(inverse).round_().clamp_(0, high)


def affine_error(
    x: Tensor, weight: Tensor, levels: Tensor, scale: Tensor, low: Tensor, absolute: bool
) -> Tensor:
    """The weighted error [n] of scale * levels + low; overwrites `levels`."""
    difference = levels.mul_(scale).add_(low).sub_(x)
    difference = difference.abs_() if absolute else difference.mul_(difference)
    return sum_columns(difference.mul_(weight))


def first_best(error: Tensor, allowed: Tensor) -> Tensor:
    """The row of least error [trials, n] among those allowed and row 0: int64 [1, n]."""
    best = torch.zeros_like(error[:1], dtype=torch.int64)
    least = error[0]
    for i in range(1, len(error)):
        better = (error[i] < least) & allowed[i]
        least = torch.where(better, error[i], least)
        best.masked_fill_(better, i)
    return best


def symmetric_search(x: Tensor, weight: Tensor, half: int) -> Fit:
    """The grid with levels -half .. half - 1 that stores x [width, n] with least weighted squared
    error. Sub-blocks that count as zero get scale 0 and the lowest level.

    Trials put the entry of largest magnitude at level -(half + 0.1 i), i = 0, -9 .. 9; each is
    refit by least squares.
    """
    largest = extreme(x, 0)
    dead = largest.abs() < EPSILON
    largest = torch.where(dead, 1.0, largest)
    tops = [-(f32(half) + f32(0.1) * f32(i)) for i in (0, *range(-9, 0), *range(1, 10))]
    inverse = column(tops, x) / largest
    xl, ll = torch.zeros_like(inverse), torch.zeros_like(inverse)
    weighted_x = weight * x
    for c in range(len(x)):
        levels = (inverse * x[c]).round_().clamp_(-half, half - 1)
        xl += weighted_x[c] * levels
        ll += (weight[c] * levels).mul_(levels)
    best, scale = best_projection(xl, ll)
    levels = (inverse.gather(0, best) * x).round_().clamp_(-half, half - 1)
    levels.nan_to_num_(0.0, -half, -half)
    return Fit(scale.masked_fill_(dead[0], 0), levels.masked_fill_(dead, -half))


def best_projection(xl: Tensor, ll: Tensor) -> tuple[Tensor, Tensor]:
    """Of trials with sums weight * x * level and weight * level^2 [trials, n], the one with the
    largest xl^2 / ll: its row int64 [1, n] and scale xl / ll [n]."""
    best = torch.zeros_like(xl[:1], dtype=torch.int64)
    scale = torch.where(ll[0] == 0, 0.0, xl[0] / ll[0])
    gain = scale * xl[0]
    for i in range(1, len(xl)):
        better = (ll[i] > 0) & (xl[i] * xl[i] > gain * ll[i])
        scale = torch.where(better, xl[i] / ll[i], scale)
        gain = torch.where(better, scale * xl[i], gain)
        best.masked_fill_(better, i)
    return best, scale


def positive_search(x: Tensor, weight: Tensor, high: int) -> Fit:
    """The grid with levels 0 .. high that stores x [width, n] >= 0 with least weighted squared
    error: a scale among nine, then levels changed one at a time while that helps."""
    largest = x.nan_to_num(0.0).amax(0).clamp_(min=0)
    dead = largest < EPSILON
    largest = torch.where(dead, 1.0, largest)
    offsets = (0, *range(-4, 0), *range(1, 5))
    inverse = column([f32(0.1) * f32(i) + f32(high) for i in offsets], x) / largest
    scales = 1 / inverse
    error = torch.zeros_like(inverse)
    for c in range(len(x)):
        levels = nearest(inverse * x[c])
        levels[0].remainder_(256)  # kept in a byte, the others are not
        levels[1:].clamp_(max=high)
        difference = x[c] - scales * levels
        error += weight[c] * difference * difference
    best = first_best(error, torch.ones_like(error, dtype=torch.bool))
    levels = nearest(inverse.gather(0, best) * x).clamp_(max=high)
    weighted_x = weight * x
    xl, ll = sum_columns(weighted_x * levels), sum_columns(weight * levels * levels)
    levels.remainder_(256)
    for _ in range(ROUNDS):
        changed = torch.zeros_like(dead)
        for c in range(len(x)):
            without_xl = xl - weighted_x[c] * levels[c]
            without_ll = ll - weight[c] * levels[c] * levels[c]
            new = nearest(x[c] * without_ll / without_xl).clamp_(max=high)
            new_xl = without_xl + weighted_x[c] * new
            new_ll = without_ll + weight[c] * new * new
            better = (without_xl > 0) & (without_ll > 0) & (new != levels[c])
            better &= new_xl * new_xl * ll > xl * xl * new_ll
            levels[c] = torch.where(better, new.remainder(256), levels[c])
            xl, ll = torch.where(better, new_xl, xl), torch.where(better, new_ll, ll)
            changed |= better
        if not changed.any():
            break
    scale = torch.where(ll > 0, xl / ll, 0.0).masked_fill_(dead, 0)
    return Fit(scale, levels.masked_fill_(dead, 0))


def descent_search(x: Tensor, half: int) -> Fit:
    """The grid with levels -half .. half - 1 for x [width, n], errors weighted by x^2: the largest
    magnitude at level -half, then levels changed one at a time while that helps."""
    largest = extreme(x, 0)
    dead = largest.abs() < EPSILON
    inverse = column([-f32(half)], x) / torch.where(dead, 1.0, largest)
    levels = nearest(inverse * x).clamp_(-half, half - 1)
    weight = x * x
    weighted_x = weight * x
    xl, ll = sum_columns(weighted_x * levels), sum_columns(weight * levels * levels)
    for _ in range(ROUNDS):
        changed = torch.zeros_like(dead[0])
        for c in range(len(x)):
            without_xl = xl - weighted_x[c] * levels[c]
            without_ll = ll - weight[c] * levels[c] * levels[c]
            new = nearest(x[c] * without_ll / without_xl).clamp_(-half, half - 1)
            new_xl = without_xl + weighted_x[c] * new
            new_ll = without_ll + weight[c] * new * new
            better = (without_xl > 0) & (new != levels[c]) & (new_ll > 0)
            better &= new_xl * new_xl * ll > xl * xl * new_ll
            levels[c] = torch.where(better, new, levels[c])
            xl, ll = torch.where(better, new_xl, xl), torch.where(better, new_ll, ll)
            changed |= better
        if not changed.any():
            break
    scale = torch.where(ll > 0, xl / ll, 0.0).masked_fill_(dead[0], 0)
    return Fit(scale, levels.masked_fill_(dead, -half))


def sum_columns(terms: Tensor) -> Tensor:
    """terms [width, ...] added from the first to the last, rounded after each."""
    if terms.device.type == "cpu" and terms.numel() > len(terms):
        # numpy adds whole rows in their order in one call (a single column it would halve)
        return torch.from_numpy(np.add.reduce(terms.contiguous().numpy(), axis=0))
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def extreme(x: Tensor, dim: int) -> Tensor:
    """The first entry of largest magnitude along `dim`, with its sign; NaN counts as nothing."""
    x = x.nan_to_num(0.0, float("inf"), -float("inf"))
    return x.gather(dim, x.abs().argmax(dim, keepdim=True))


def nearest(x: Tensor) -> Tensor:
    """The nearest integer, half to even, as the reference finds it: where |x| >= 2^22, infinite or
    NaN it reads the same bits as for others, whatever they mean then. float32."""
    bits = (x + SNAP).view(torch.int32)
    return ((bits & 0x7FFFFF) - 0x400000).float()


def error_weights(x: Tensor, importance: Tensor, mean_square: Tensor) -> Tensor:
    """importance * sqrt(mean_square + x^2): a large weight's error counts more."""
    return importance * square_root(mean_square + x * x)


def square_root(x: Tensor) -> Tensor:
    """float32, rounded once: torch's own float32 root on a CPU is one bit off for every sixth x."""
    return x.double().sqrt_().float()


def f32(value: float) -> np.float32:
    """A constant in the precision in which the reference computes with it."""
    return np.float32(value)


def column(values: list[np.float32], like: Tensor) -> Tensor:
    """Constants as float32 [len, 1], to be divided: torch takes a number's quotient by a tensor
    for the product with its inverse, which rounds twice."""
    return torch.tensor(np.array(values), device=like.device).view(-1, 1)


def divide(a: float, b: Tensor) -> Tensor:
    """a / b, rounded once."""
    return torch.tensor(a, dtype=torch.float32, device=b.device) / b
