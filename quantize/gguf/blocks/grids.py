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

RINGS = {"IQ1_S": 3, "IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 1, "IQ3_XXS": 2, "IQ3_S": 3}


class Grid(NamedTuple):
    """`values` float32 and `levels` uint8 [points, width]: what a point stands for, and the indices
    of that among the distinct values. `point_of` int32 [2^(width * bits)]: the point that has the
    levels of a key, else -1 - a row of `neighbours` int64 [rows, most], which -1 fills up.
    """

    values: Tensor
    levels: Tensor
    bits: int
    point_of: Tensor
    neighbours: Tensor

    def keys(self, levels: Tensor) -> Tensor:
        """Levels [..., width] as int32 keys, the first level in the lowest bits."""
        shifts = torch.arange(levels.shape[-1], device=levels.device) * self.bits
        return (levels.to(torch.int64) << shifts).sum(-1).to(torch.int32)


@cache
def grid(name: str, device: str = "cpu") -> Grid:
    """The grid of the type `name` on a device."""
    if device != "cpu":
        return Grid(*(t.to(device) if isinstance(t, Tensor) else t for t in grid(name)))
    quant = gguf.quants._type_traits[gguf.GGMLQuantizationType[name]]
    quant.init_grid()
    values = torch.from_numpy(np.array(quant.grid)).view(quant.grid_shape)
    distinct = torch.tensor(quant.grid_map, dtype=torch.float32)
    levels = torch.searchsorted(distinct, values.contiguous())
    bits = (len(distinct) - 1).bit_length()
    shifts = torch.arange(levels.shape[1]) * bits
    point_of = torch.full((1 << bits * levels.shape[1],), -1, dtype=torch.int32)
    point_of[(levels << shifts).sum(-1)] = torch.arange(len(levels), dtype=torch.int32)
    every = torch.cartesian_prod(*[torch.arange(len(distinct))] * levels.shape[1])
    off = every[point_of[(every << shifts).sum(-1)] < 0]
    neighbours = _neighbours(off, levels, RINGS[name])
    point_of[(off << shifts).sum(-1)] = -1 - torch.arange(len(off), dtype=torch.int32)
    return Grid(values, levels.to(torch.uint8), bits, point_of, neighbours)


def _neighbours(off: Tensor, levels: Tensor, rings: int) -> Tensor:
    """For levels off the grid [rows, width], the points at the `rings` smallest distances."""
    rows = []
    for some in off.split(512):
        distance = (some[:, None] - levels).square().sum(-1)
        limit = torch.full_like(distance[:, 0], -1)
        for _ in range(rings):  # the next larger distance that occurs
            farther = distance > limit[:, None]
            limit = distance.masked_fill(~farther, distance.max() + 1).amin(-1)
        order = distance.argsort(stable=True, dim=-1)
        rows.append(order.masked_fill(distance.gather(-1, order) > limit[:, None], -1))
    table = torch.cat(rows)
    return table[:, : int((table >= 0).sum(-1).max())].contiguous()
