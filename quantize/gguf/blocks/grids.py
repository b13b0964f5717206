"""The grids of the IQ types: points of 4 or 8 small levels, of which a block stores the numbers.

The points are llama.cpp's, taken from the package `gguf`. Levels that are no point of the grid go
to one of its nearest: which, a search decides by the error, among all that lie at the `rings`
smallest distances, the nearest and lowest-numbered first.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from .search import sum_columns

RINGS = {"IQ1_S": 3, "IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 1, "IQ3_XXS": 2, "IQ3_S": 3}


class Neighbours(NamedTuple):
    """Of levels that are no point: `points` int64, those of row r from `starts`[r] on, `counts`[r]
    of them."""

    points: Tensor
    starts: Tensor
    counts: Tensor


class Grid(NamedTuple):
    """`values` float32 and `levels` int64 [points, width]: what a point stands for, and the indices
    of that among the distinct values. `bits`: of a level in a key. `point_of` int64
    [2^(width * bits)]: the point that has the levels of a key, else -1 - a row of `neighbours`.
    """

    values: Tensor
    levels: Tensor
    bits: int
    point_of: Tensor
    neighbours: Neighbours

    def points(self, levels: Tensor) -> Tensor:
        """Whole numbers [groups, width, n] as int64 [groups, n]: the points that have these levels,
        or -1 - a row of `neighbours`."""
        shifts = torch.arange(levels.shape[1], device=levels.device).view(-1, 1) * self.bits
        return self.point_of[(levels.to(torch.int64) << shifts).sum(1)]

    def nearest(self, rows: Tensor, x: Tensor, weight: Tensor, values: Tensor) -> Tensor:
        """Of the neighbours of each row the point with the least weight * difference^2: int64 [m].

        rows: of `neighbours`, int64 [m]; x, weight: float32 [width, m]; values: what the distinct
        levels stand for, float32 [levels, m].
        """
        counts = self.neighbours.counts[rows]
        owner = torch.arange(len(rows), device=rows.device).repeat_interleave(counts)
        ends = counts.cumsum(0)
        at = torch.arange(len(owner), device=rows.device) - (ends - counts)[owner]
        candidates = self.neighbours.points[self.neighbours.starts[rows][owner] + at]
        terms = torch.empty(len(x), len(owner), device=x.device)
        levels = self.levels[candidates]
        for i in range(len(x)):
            difference = values[levels[:, i], owner].sub_(x[i][owner])
            torch.mul(weight[i][owner], difference, out=terms[i])
            terms[i].mul_(difference)
        error = sum_columns(terms)
        least = torch.full_like(x[0], float("inf")).scatter_reduce_(0, owner, error, "amin")
        at.masked_fill_(error != least[owner], len(self.levels))  # the first of equals counts
        first = torch.full_like(rows, len(self.levels)).scatter_reduce_(0, owner, at, "amin")
        return self.neighbours.points[self.neighbours.starts[rows] + first % len(self.levels)]


@cache
def grid(name: str, device: str = "cpu") -> Grid:
    """The grid of the type `name` on a device."""
    if device != "cpu":
        g = grid(name)
        neighbours = Neighbours(*(t.to(device) for t in g.neighbours))
        values, levels, point_of = (t.to(device) for t in (g.values, g.levels, g.point_of))
        return Grid(values, levels, g.bits, point_of, neighbours)
    quant = gguf.quants._type_traits[gguf.GGMLQuantizationType[name]]
    quant.init_grid()
    values = torch.from_numpy(np.array(quant.grid)).view(quant.grid_shape)
    distinct = torch.tensor(quant.grid_map, dtype=torch.float32)
    levels = torch.searchsorted(distinct, values.contiguous())
    bits = (len(distinct) - 1).bit_length()
    shifts = torch.arange(levels.shape[1]) * bits
    point_of = torch.full((1 << bits * levels.shape[1],), -1, dtype=torch.int64)
    point_of[(levels << shifts).sum(-1)] = torch.arange(len(levels))
    every = torch.cartesian_prod(*[torch.arange(len(distinct))] * levels.shape[1])
    off = every[point_of[(every << shifts).sum(-1)] < 0]
    point_of[(off << shifts).sum(-1)] = -1 - torch.arange(len(off))
    return Grid(values, levels, bits, point_of, _neighbours(off, levels, RINGS[name]))


def _neighbours(off: Tensor, levels: Tensor, rings: int) -> Neighbours:
    """For levels off the grid [rows, width], the points at the `rings` smallest distances."""
    points, counts = [], []
    narrow = levels.float()
    squares = narrow.square().sum(-1)
    for some in off.float().split(512):
        distance = some.square().sum(-1, keepdim=True) - 2 * some @ narrow.T + squares
        distance = distance.to(torch.int16)  # whole numbers, exact
        limit = torch.full_like(distance[:, 0], -1)
        for _ in range(rings):  # the next larger distance that occurs
            farther = distance > limit[:, None]
            limit = distance.masked_fill(~farther, distance.max() + 1).amin(-1)
        near = distance <= limit[:, None]
        counts.append(near.sum(-1))
        row, point = near.nonzero(as_tuple=True)
        order = (row * 1024 + distance[row, point]).argsort(stable=True)
        points.append(point[order])
    count = torch.cat(counts)
    return Neighbours(torch.cat(points), count.cumsum(0) - count, count)
