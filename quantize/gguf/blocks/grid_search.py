"""The search for the scale of a sub-block whose levels are points of a grid (grids.py).

A weight is scale * (2 * level + 1) with its sign apart; groups of 4 or 8 weights take a point of
the grid. Sub-blocks lie in columns, as in search.py: x [groups, width, n].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .grids import Grid
from .search import column, f32, nearest, positive_search, square_root, sum_columns


class GridFit(NamedTuple):
    """`scale` float32 [n] >= 0; `points` int64 [groups, n]; bool [n]: `flipped`, all signs are the
    other way round; `dead`, the sub-block counts as zero: scale 0, point 0."""

    scale: Tensor
    points: Tensor
    flipped: Tensor
    dead: Tensor


class Trials(NamedTuple):
    """Scales that put the largest value at level `top + step * i`, i = -count .. count.

    positive_start: around what positive_search finds, with one level more, instead of around the
    largest value. afresh: the points are chosen once more by the fitted scale: "all" of them,
    "off" those that were not of the grid, or "any", all where one was not.
    """

    count: int
    step: float
    afresh: str
    positive_start: bool = False


class Chosen(NamedTuple):
    """`points` int64 [groups, n]; `on_grid`: whether rounding alone found them."""

    points: Tensor
    on_grid: Tensor


def grid_search(x: Tensor, weight: Tensor, grid: Grid, trials: Trials, dead: Tensor) -> GridFit:
    """The scale and points that store x [groups, width, n] with least weighted squared error.

    x: magnitudes, of which one of each group may be negative. dead: bool [n], sub-blocks that count
    as zero anyway.
    """
    highest = int(grid.levels.max())
    flat, flat_weight = x.flatten(0, 1), weight.flatten(0, 1)
    root = square_root(weight)
    top = 2 * highest + 1
    if trials.positive_start:
        scale = positive_search(flat, flat_weight, highest + 2).scale
        largest = scale * (highest + 1)
        dead = dead | ~(largest > 0)
    else:
        largest = flat.amax(0)
        scale = largest / torch.tensor(float(top), device=x.device)
    largest = torch.where(dead, 1.0, largest)
    best = torch.zeros_like(scale)
    points = torch.zeros_like(x[:, 0], dtype=torch.int64)
    on_grid = torch.full_like(points, trials.afresh != "any", dtype=torch.bool)
    steps = [f32(top) + f32(i) * f32(trials.step) for i in range(-trials.count, trials.count + 1)]
    for inverse in column(steps, x) / largest:
        chosen = choose_points(x, root, inverse, 1 / inverse, grid)
        xq, qq = projections(flat, flat_weight, chosen.points, grid)
        better = (qq > 0) & (xq * xq > best * qq)
        scale = torch.where(better, xq / qq, scale)
        best = torch.where(better, scale * xq, best)
        points = torch.where(better, chosen.points, points)
        on_grid = torch.where(better, chosen.on_grid, on_grid)
    again = (scale > 0) & ~dead
    if trials.afresh != "all":
        again = again & ~on_grid.all(0)
    chosen = choose_points(x, root, 1 / scale, scale, grid)
    kept = on_grid if trials.afresh == "off" else torch.zeros_like(on_grid)
    points = torch.where(again & ~kept, chosen.points, points)
    xq, qq = projections(flat, flat_weight, points, grid)
    scale = torch.where(again & (qq > 0), xq / qq, scale)
    flipped = scale < 0
    return GridFit(scale.abs().masked_fill(dead, 0), points.masked_fill(dead, 0), flipped, dead)


def choose_points(x: Tensor, root: Tensor, inverse: Tensor, scale: Tensor, grid: Grid) -> Chosen:
    """The point of each group of x [groups, width, n]: that of the rounded levels, or among the
    nearest the one with the least error, weighted by `root`."""
    highest = int(grid.levels.max())
    levels = nearest((inverse * x).sub_(1).mul_(0.5)).clamp_(0, highest)
    found = grid.points(levels)
    on_grid = found >= 0
    group, at = (~on_grid).nonzero(as_tuple=True)
    if len(group):
        steps = torch.arange(1, 2 * highest + 2, 2, device=x.device).view(-1, 1)
        mine, weight = (t[group, :, at].T.contiguous() for t in (x, root))
        found[group, at] = grid.nearest(-1 - found[group, at], mine, weight, steps * scale[at])
    return Chosen(found, on_grid)


def projections(x: Tensor, weight: Tensor, points: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Sums [n] of weight * x * q and weight * q^2 with q the values of the points [groups, n]."""
    q = (2 * grid.levels[points] + 1).float()  # [groups, n, width]
    q = q.transpose(1, 2).reshape(x.shape)
    return sum_columns(weight * x * q), sum_columns(weight * q * q)
