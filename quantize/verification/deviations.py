"""How far a quantized weight lies from the original, and what of it no quantizer leaves behind.

The relative error tells whether a tensor as a whole is right. A few thousand damaged bytes of a
large tensor hardly move it, so single weights are looked at too: an error is measured against half
the range that its scale spans (or the largest weight near by, if that is more). Rounding leaves
half a step of it. GPTQ, which lets a weight make up for the errors of others, leaves more: up to
1.9 of it, in a row's every group twice the group. But it does so in a few columns, which hardly
count or make up for many, and in single rows: so it is in SmolLM2-135M (106 million weights) by
three programs. So what stands out most of these is measured by its own usual error (`calmed`), and
damage, wherever it is, stands out of the rest.

Where weights were only rounded, a code that is not the nearest is a fault by itself, in any number
of bits; whether they were is told by all linears together (`rounded_apart`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.affine import quantize_affine
from ..quantized import Quantized, elements
from ..spec import Group, QuantSpec

FITS = 4  # rounds of fitting factors of rows and columns
NEAR = 32  # columns
LIMITS = {2: 1.75, 3: 1.25, 4: 1.0, 5: 0.75, 6: 0.5, 7: 0.375, 8: 0.25}  # by bits, of half a range
FLOAT_LIMITS = {4: 1.0, 8: 0.4}  # the same of floats, whose steps are wide at the range's end
GROUP_LIMIT = 2.0  # of a group's own norm
EMPTY = 0.05  # of the usual norm, below which a group is all but empty
SAMPLE = 256  # rows or columns by which a column or row is judged
# most columns and rows that may have errors of their own size, and where in the order of its errors
# the usual one of a column or row stands, below what damage to parts of it reaches
COLUMNS, COLUMN_SHARE = 8, 0.5
ROWS, ROW_SHARE = 2, 0.25
SLACK = 0.05  # of a step, by which a code may be further off than the nearest
SCALE_ROUNDING = 256  # so much of a weight, for a scale that was rounded to bfloat16 afterwards
FEW = 4  # strays that do not count, and one in so many
ONE_IN = 1_000_000


class Deviation(NamedTuple):
    """relative_error: the norm of the difference over the original's. weights: how many there are;
    strays: those whose error the scheme does not explain; first: the row and column of one.
    misplaced: those whose code is not the nearest, None where that cannot be told; astray: one."""

    relative_error: float
    weights: int
    strays: int = 0
    first: tuple[int, int] = (0, 0)
    misplaced: int | None = None
    astray: tuple[int, int] = (0, 0)

    @property
    def explained(self) -> bool:
        """Whether there are no more strays than chance may leave."""
        return self.strays <= FEW + self.weights // ONE_IN


def deviation(q: Quantized, values: Tensor, weight: Tensor) -> Deviation:
    """Of the quantized linear `q`, worth `values` float32 [out, in], from the original `weight`."""
    error = (values - weight).abs()
    ones = q._replace(codes=torch.ones_like(q.codes), zero_point=None)
    reach = ones.dequantize().abs_() * _half_range(q.spec)
    misplaced = _misplaced(q, error, weight, reach)
    near = torch.maximum(reach, _largest_near(weight))
    error = calmed(error, near)
    strays = error > _limit(q.spec) * near
    match q.spec.granularity:
        case Group(size) if q.g_idx is None:
            strays |= _stray_groups(error, weight, size)
    found = _found(relative_error(values, weight), strays)
    if misplaced is None:
        return found
    return found._replace(misplaced=int(misplaced.sum()), astray=_first(misplaced))


def rounded_apart(told: Mapping[str, Deviation]) -> dict[str, Deviation]:
    """Of linears by name, those that have other codes than the nearest, where the others have none;
    nothing where that is usual, as GPTQ leaves it (a tenth of the codes and more)."""
    shares = [d.misplaced / d.weights for d in told.values() if d.misplaced is not None]
    if len(shares) < FEW or statistics.median(shares) > 1 / ONE_IN:
        return {}
    return {n: d for n, d in told.items() if d.misplaced and d.misplaced > d.weights // ONE_IN}


def _misplaced(q: Quantized, error: Tensor, weight: Tensor, reach: Tensor) -> Tensor | None:
    """Where another code is nearer, by more than rounding a scale moves the border between two."""
    if q.g_idx is not None:
        return None
    scale = q.float_scale()
    codes = quantize_affine(weight, scale, q.zero_point, elements(q.spec), q.spec.block)
    best = (q._replace(codes=codes).dequantize() - weight).abs_()
    slack = weight.abs() / SCALE_ROUNDING
    if q.spec.type == "int":
        slack += SLACK * reach / _half_range(q.spec)
    return error > best + slack


def blockwise(values: Tensor, weight: Tensor, bits: float, width: int) -> Deviation:
    """The same of values whose scales are not at hand, in blocks of `width` columns and about so
    many bits."""
    error = (values - weight).abs()
    limit = LIMITS[max(2, min(8, int(bits)))]
    near = _largest_near(weight, max(NEAR, width))
    error = calmed(error, near)
    strays = error > limit * near
    return _found(relative_error(values, weight), strays | _stray_groups(error, weight, width))


def calmed(error: Tensor, near: Tensor) -> Tensor:
    """`error`, by how many times the usual errors of the few wildest columns and rows, as shares of
    `near`, are those of the others."""
    ratio = error / near.clamp_min(1e-30)
    columns = _wildness(ratio[:: -(-len(ratio) // SAMPLE)], COLUMNS, COLUMN_SHARE)
    ratio /= columns
    rows = _wildness(ratio[:, :: -(-ratio.shape[1] // SAMPLE)].T, ROWS, ROW_SHARE)
    return error / columns / rows.unsqueeze(1)


def _wildness(ratio: Tensor, most: int, share: float) -> Tensor:
    """[columns]: of each column of [rows, columns], how many times the others' is the error below
    which `share` of its own lie; 1 of all but `most`."""
    ordered = ratio.contiguous().sort(dim=0).values
    usual = ordered[int(share * len(ordered))]
    times = (usual / usual.median().clamp_min(1e-30)).clamp_min(1)
    wildest = times.topk(min(most, len(times))).indices
    return torch.ones_like(times).index_copy(0, wildest, times[wildest])


def relative_error(values: Tensor, weight: Tensor) -> float:
    size = weight.norm().item()
    return (values - weight).norm().item() / size if size else float(bool(values.any()))


def fitted(weight: Tensor, values: Tensor) -> Tensor:
    """`weight` with its rows and columns scaled to come nearest to `values`."""
    for _ in range(FITS):
        for axis in (0, 1):
            energy = weight.square().sum(axis, keepdim=True).clamp_min(1e-30)
            weight = weight * ((values * weight).sum(axis, keepdim=True) / energy)
    return weight


def _half_range(spec: QuantSpec) -> float:
    highest = elements(spec).highest
    return highest + 1 if spec.type == "int" else highest


def _limit(spec: QuantSpec) -> float:
    return (LIMITS if spec.type == "int" else FLOAT_LIMITS)[spec.num_bits]


def _largest_near(weight: Tensor, columns: int = NEAR) -> Tensor:
    """The largest magnitude in each run of columns, [out, in]."""
    rows, width = weight.shape
    if width % columns:
        return weight.abs().amax(1, keepdim=True).expand_as(weight)
    runs = weight.view(rows, -1, columns).abs().amax(-1, keepdim=True)
    return runs.expand(-1, -1, columns).reshape_as(weight)


def _stray_groups(error: Tensor, weight: Tensor, size: int) -> Tensor:
    """Where a whole group, of `size` columns, is further off than it is large."""
    grouped = (weight.shape[0], -1, size)
    norms = weight.view(grouped).norm(dim=-1)
    norms = norms.clamp_min(EMPTY * float(norms.mean()))
    off = error.view(grouped).norm(dim=-1) > GROUP_LIMIT * norms
    return off.unsqueeze(-1).expand(-1, -1, size).reshape_as(weight)


def _found(relative: float, strays: Tensor) -> Deviation:
    return Deviation(relative, strays.numel(), int(strays.sum()), _first(strays))


def _first(where: Tensor) -> tuple[int, int]:
    """The row and column of the first that is true."""
    row, column = divmod(int(where.flatten().int().argmax()), where.shape[1])
    return row, column
