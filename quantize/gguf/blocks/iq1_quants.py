"""IQ1_S and IQ1_M: 256 weights as points of a grid of -1, 0 and 1, shifted by an eighth up or down.

With three levels the best split of a sub-block can be found outright: in ascending order of the
weights, two boundaries part the levels, and all pairs of them are tried, with each shift. IQ1_S has
a scale and a shift for 32 weights; IQ1_M a scale for 16, a shift for 8, and its float16 scale in
the four top bits of four words of scales.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from . import fields
from .base import Codec
from .fields import from_half_bytes, to_half_bytes
from .grids import Grid, grid
from .search import error_weights, nearest, sum_columns

BLOCK, GROUP = 256, 8
DELTA = 0.125
LEVELS = {1: (-1 + DELTA, DELTA, 1 + DELTA), -1: (-1 - DELTA, -DELTA, 1 - DELTA)}
GRID = "IQ1_S"


class Split(NamedTuple):
    """The best split of n sub-blocks. `scale` float32 [n]; `levels` int64 [sub, n] of 0, 1, 2;
    `option` int64 [n]: which shifts, -1 where no split stores anything."""

    scale: Tensor
    levels: Tensor
    option: Tensor


class OneBitCodec(Codec):
    """`options`: the shift of each group of 8 weights of a sub-block, for every choice of them.
    `mirrored`: the option with all shifts the other way round, of each. `smallest`: sub-blocks
    below count as zero. `dead_option`: theirs."""

    block = BLOCK
    uses_importance = True
    slice_weights = 1 << 15  # a search has many candidates for each weight
    sub: ClassVar[int]
    options: ClassVar[tuple[tuple[int, ...], ...]]
    mirrored: ClassVar[tuple[int, ...]]
    smallest: ClassVar[float]

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        weight = x * x
        if importance is not None:
            square = 2 * sum_columns(weight.T.contiguous()) / BLOCK
            weight = error_weights(x, importance, square.view(-1, 1))
        columns, weight = (t.reshape(-1, cls.sub).T.contiguous() for t in (x, weight))
        order = columns.argsort(stable=True, dim=0)
        split = cls.best_split(columns.gather(0, order), weight.gather(0, order), order)
        dead = ~(columns.abs().amax(0) >= cls.smallest) | (split.option < 0)
        levels = torch.empty_like(split.levels).scatter_(0, order, split.levels)
        mirrored = torch.tensor(cls.mirrored, device=x.device)
        option = split.option.clamp(min=0)
        turned = split.scale < 0
        option = torch.where(turned, mirrored[option], option).masked_fill_(dead, 0)
        levels = torch.where(turned, 2 - levels, levels)
        scale = split.scale.abs().masked_fill_(dead, 0)
        values = cls.level_values(option)
        points, scale = fit_points(columns, weight, scale, levels, values)
        points, scale = points.masked_fill_(dead, 0), scale.masked_fill_(dead, 0)
        largest = scale.view(len(x), -1).amax(-1, keepdim=True)
        d = largest / torch.tensor(15.0, device=x.device)
        codes = nearest(0.5 * (scale.view(len(x), -1) * (1 / d) - 1)).clamp_(0, 7)
        codes = torch.where(d == 0, 0, codes)
        if cls.sub == 16:
            levels = grid(GRID, str(x.device)).levels[points]
            d = refit(columns, weight, values, levels, codes)
            d = torch.where(largest == 0, 0.0, d)
        rows = points.T.reshape(len(x), -1)
        return cls.pack(d, codes.to(torch.int64), option.view(len(x), -1), rows)

    @classmethod
    def level_values(cls, option: Tensor) -> Tensor:
        """What levels 0, 1, 2 stand for in each group of n sub-blocks: float32 [groups, 3, n]."""
        table = torch.tensor([[LEVELS[s] for s in shifts] for shifts in cls.options])
        return table.to(option.device)[option].permute(1, 2, 0)

    @classmethod
    @abstractmethod
    def best_split(cls, x: Tensor, weight: Tensor, order: Tensor) -> Split:
        """The split of sub-blocks in ascending order, x [sub, n]; order: where each was before."""

    @classmethod
    @abstractmethod
    def pack(cls, d: Tensor, codes: Tensor, option: Tensor, points: Tensor) -> Tensor:
        """d float32 [n, 1]; int64 codes and option [n, 256 / sub], points [n, 32] to bytes."""


class Search:
    """Keeps the best of splits that are offered one after another. x [sub, n] is what they split;
    `options`: how many choices of shifts."""

    def __init__(self, x: Tensor) -> None:
        self._rows = torch.arange(len(x), device=x.device).view(-1, 1)
        self.scale = x[-1].clone()
        self._gain = torch.full_like(self.scale, -torch.finfo(torch.float32).max)
        self._first = torch.full_like(self.scale, -1, dtype=torch.int64)
        self._second, self._option = self._first.clone(), self._first.clone()

    def offer(self, xq: Tensor, qq: Tensor, first: int, second: int, option: int) -> None:
        """Level 0 below `first`, 2 from `second`: sums of weight * x * q and weight * q^2 [n]."""
        better = (qq > 0) & (xq * xq > self._gain * qq)
        self.scale = torch.where(better, xq / qq, self.scale)
        self._gain = torch.where(better, self.scale * xq, self._gain)
        self._first.masked_fill_(better, first)
        self._second.masked_fill_(better, second)
        self._option.masked_fill_(better, option)

    def best(self) -> Split:
        levels = (self._rows >= self._first).to(torch.int64) + (self._rows >= self._second)
        return Split(self.scale, levels, self._option)


def boundaries(count: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(count + 1) for j in range(i, count + 1))


def fit_points(
    x: Tensor, weight: Tensor, scale: Tensor, levels: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Points int64 [groups, n] for levels [sub, n], and the scale refitted where some are no point
    of the grid. values: of the levels, [groups, 3, n]."""
    g = grid(GRID, str(x.device))
    shape = (len(x) // GROUP, GROUP, -1)
    grouped, grouped_weight = x.view(shape), weight.view(shape)
    found = g.points(levels.view(shape))
    off = found < 0
    group, at = off.nonzero(as_tuple=True)
    if len(group):
        mine, cost = (t[group, :, at].T.contiguous() for t in (grouped, grouped_weight))
        steps = values[group, :, at].T * scale[at]
        found[group, at] = g.nearest(-1 - found[group, at], mine, cost, steps)
    q = point_values(g, found, values)
    xq, qq = sum_columns(weight * q * x), sum_columns(weight * q * q)
    refitted = off.any(0) & (xq > 0) & (qq > 0)
    return found, torch.where(refitted, xq / qq, scale)


def point_values(g: Grid, points: Tensor, values: Tensor) -> Tensor:
    """What points [groups, n] stand for: float32 [groups * 8, n]."""
    levels = g.levels[points].transpose(1, 2)  # [groups, 8, n]
    return values.gather(1, levels).flatten(0, 1)


def refit(x: Tensor, weight: Tensor, values: Tensor, levels: Tensor, codes: Tensor) -> Tensor:
    """d [n, 1] of whole blocks, fitted to the rounded scales [n, 16]. levels: [2, n * 16, 8]."""
    q = values.gather(1, levels.transpose(1, 2)).flatten(0, 1)  # [16, n * 16]
    q = q * (2 * codes.flatten() + 1)

    def in_blocks(columns: Tensor) -> Tensor:
        return columns.T.reshape(-1, BLOCK).T.contiguous()

    xq = sum_columns(in_blocks(weight * q * x))
    qq = sum_columns(in_blocks(weight * q * q))
    return torch.where(qq > 0, xq / qq, 0.0).view(-1, 1)


class IQ1_S(OneBitCodec):
    """d; 32 bytes of points, low bits; 8 words: four times 3 high bits, 3 of scale, a shift."""

    name, nbytes, sub, smallest = "IQ1_S", 50, 32, 1e-12
    options, mirrored = ((1,) * 4, (-1,) * 4), (1, 0)
    needs_importance = True

    @classmethod
    def best_split(cls, x: Tensor, weight: Tensor, order: Tensor) -> Split:
        sum_x, sum_w = (torch.zeros(cls.sub + 1, x.shape[1], device=x.device) for _ in range(2))
        for j in range(cls.sub):
            sum_x[j + 1] = sum_x[j] + weight[j] * x[j]
            sum_w[j + 1] = sum_w[j] + weight[j]
        search = Search(x)
        for i, j in boundaries(cls.sub):
            parts_x = sum_x[i] - sum_x[0], sum_x[j] - sum_x[i], sum_x[-1] - sum_x[j]
            parts_w = sum_w[i] - sum_w[0], sum_w[j] - sum_w[i], sum_w[-1] - sum_w[j]
            for option, shift in enumerate((1, -1)):
                a, b, c = LEVELS[shift]
                xq = parts_x[0] * a + parts_x[1] * b + parts_x[2] * c
                qq = parts_w[0] * a * a + parts_w[1] * b * b + parts_w[2] * c * c
                search.offer(xq, qq, i, j, option)
        return search.best()

    @classmethod
    def pack(cls, d: Tensor, codes: Tensor, option: Tensor, points: Tensor) -> Tensor:
        at = torch.arange(0, 12, 3, device=points.device)
        words = ((points >> 8).view(-1, 8, 4) << at).sum(-1) | codes << 12 | option << 15
        low = (points & 255).to(torch.uint8)
        return torch.cat([to_half_bytes(d * 1.125), low, fields.to_bytes(words, 2)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        words = fields.from_bytes(data[:, 34:], 2)
        high = words.unsqueeze(-1) >> torch.arange(0, 12, 3, device=data.device) & 7
        points = data[:, 2:34].to(torch.int64) | high.flatten(1) << 8
        scale = from_half_bytes(data[:, :2]) * (2 * (words >> 12 & 7) + 1)
        delta = DELTA - 2 * DELTA * (words >> 15).float()
        values = grid(GRID, str(data.device)).values[points].view(-1, 8, 32)
        return (scale.unsqueeze(-1) * (values + delta.unsqueeze(-1))).flatten(1)


class IQ1_M(OneBitCodec):
    """32 bytes of points, low bits; 16 bytes: twice 3 high bits and a shift; 4 words: four times 3
    bits of scale, 4 of d."""

    name, nbytes, sub, smallest = "IQ1_M", 56, 16, 1e-7
    options, mirrored = ((1, 1), (1, -1), (-1, 1), (-1, -1)), (3, 2, 1, 0)

    @classmethod
    def best_split(cls, x: Tensor, weight: Tensor, order: Tensor) -> Split:
        size = (2, cls.sub + 1, x.shape[1])
        sum_x, sum_w = torch.zeros(size, device=x.device), torch.zeros(size, device=x.device)
        for j in range(cls.sub):  # running sums of each half's weights among those in order
            for half in range(2):
                mine = order[j] // GROUP == half
                sum_x[half, j + 1] = sum_x[half, j] + torch.where(mine, weight[j] * x[j], 0.0)
                sum_w[half, j + 1] = sum_w[half, j] + torch.where(mine, weight[j], 0.0)
        search = Search(x)
        for i, j in boundaries(cls.sub):
            halves = {}
            for shift, (a, b, c) in LEVELS.items():
                xq = sum_x[:, -1] * c - (sum_x[:, j] + sum_x[:, i])  # levels are 1 apart
                qq = sum_w[:, -1] * c * c + sum_w[:, i] * (a * a - b * b)
                halves[shift] = xq, qq + sum_w[:, j] * (b * b - c * c)
            for option, (first, second) in enumerate(cls.options):
                (xq, qq), (xq2, qq2) = halves[first], halves[second]
                search.offer(xq[0] + xq2[1], qq[0] + qq2[1], i, j, option)
        return search.best()

    @classmethod
    def pack(cls, d: Tensor, codes: Tensor, option: Tensor, points: Tensor) -> Tensor:
        high, shifts = points >> 8, torch.stack([option >> 1, option & 1], -1).flatten(1)
        nibbles = (high | shifts << 3).to(torch.uint8)
        words = (codes.view(-1, 4, 4) << torch.arange(0, 12, 3, device=points.device)).sum(-1)
        bits = fields.from_bytes(to_half_bytes(d * 1.1125), 2)
        words |= (bits >> torch.arange(0, 16, 4, device=points.device) & 15) << 12
        low = (points & 255).to(torch.uint8)
        pairs = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        return torch.cat([low, pairs, fields.to_bytes(words, 2)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        low, pairs, words = data.split([32, 16, 8], -1)
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).to(torch.int64)
        points = low.to(torch.int64) | (nibbles & 7) << 8
        words = fields.from_bytes(words, 2)
        bits = (words >> 12 << torch.arange(0, 16, 4, device=data.device)).sum(-1, keepdim=True)
        d = from_half_bytes(fields.to_bytes(bits, 2))
        codes = words.unsqueeze(-1) >> torch.arange(0, 12, 3, device=data.device) & 7
        scale = (d * (2 * codes.flatten(1) + 1)).view(-1, 16, 1, 1)
        delta = (DELTA - 2 * DELTA * (nibbles >> 3).float()).view(-1, 16, 2, 1)
        values = grid(GRID, str(data.device)).values[points].view(-1, 16, 2, GROUP)
        return (scale * (values + delta)).flatten(1)
