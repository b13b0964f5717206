"""GPTQ onto the grids of GGUF's blocks (the method: passes/gptq.py, whose notation this keeps).

The grid of a block is chosen when its first column is due: the codec's own search for scales, on
weights that already make up for the columns before, where errors count as the Hessian's diagonal
says. Its columns are then rounded on that grid, and each error is spread over the columns to come.
A block's columns must follow each other, so the order is one of blocks, the most excited first, and
of the columns within each: activation order as far as a file can have it without a permutation.

After the last column codes are looked at again under the whole Hessian with all others fixed, as in
passes/refine.py; the scales stay. Rows do not interact and are done at once, held as [in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ...kernels.finite import all_finite
from ..passes.gptq import Factor
from .blocks.base import in_threads
from .blocks.scaled import ScaledCodec, Scales

LAZY = 128  # columns between two updates of all that follow, or one block where that is more
INNER = 32  # columns between two updates of the rest of those; a block is a multiple


class BlocksResult(NamedTuple):
    """blocks: uint8 [out, bytes]. error: float32 [out], each row's mean squared output difference
    as far as the damped Hessian tells."""

    blocks: Tensor
    error: Tensor


def block_order(diagonal: Tensor, block: int) -> Tensor:
    """A processing order, int64 [in], that keeps blocks of `block` columns together: blocks and the
    columns of each in falling order of `diagonal` float32 [in], the Hessian's."""
    parts = diagonal.view(-1, block)
    inside = parts.argsort(dim=1, descending=True, stable=True)
    blocks = parts.sum(1).argsort(dim=0, descending=True, stable=True)
    return (blocks.view(-1, 1) * block + inside[blocks]).flatten()


def gguf_gptq(w: Tensor, factor: Factor, codec: type[ScaledCodec], sweeps: int = 0) -> BlocksResult:
    """Blocks of w [out, in], any float dtype, against the factored Hessian of its input.

    factor: whose order keeps blocks of `codec` together. sweeps: later looks at every code.
    Deterministic; w is not changed. UserError where w is not finite or becomes too large for
    float16, the type of scales.
    """
    if not all_finite(w):
        raise UserError("the weight holds NaN or infinite values: the model is damaged")
    state = _State(w, factor, codec)
    span = max(codec.block, LAZY // codec.block * codec.block)
    for start in range(0, w.shape[1], span):
        state.solve(start, min(start + span, w.shape[1]))
    state.look_again(sweeps, span)
    return state.result()


class _State:
    """working: weights in processing order, consumed. values: [in, out], memory order. grids: of
    each sub-block, by its number. fields: of each block's scales, by its number."""

    def __init__(self, w: Tensor, factor: Factor, codec: type[ScaledCodec]) -> None:
        self._factor, self._codec = factor, codec
        self._w = w.float().T.contiguous()
        self._working = self._w[factor.order].contiguous()
        self._order = factor.order.tolist()
        self._values = torch.empty_like(self._working)
        self._rows = self._values.unbind(0)
        self._grids: dict[int, _Grid] = {}
        self._fields: dict[int, tuple[Tensor, ...]] = {}

    def solve(self, start: int, stop: int) -> None:
        """Columns start .. stop of the order, whole blocks; then what follows makes up for them."""
        block, u = self._codec.block, self._factor.u
        due = self._working[start:stop]
        pivots = u.diagonal()[start:stop].tolist()

        def decide(i: int, column: Tensor, error: Tensor) -> None:
            if i % block == 0:
                self._choose(start + i, due[i : i + block])
            value = self._round(self._order[start + i], column)
            torch.sub(column, value, out=error).div_(pivots[i])

        errors = torch.empty_like(due)
        _in_turn(due, u[start:stop, start:stop], decide, errors)
        if stop < len(u):
            self._working[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1)

    def look_again(self, sweeps: int, span: int) -> None:
        """Every code `sweeps` times more: the one of least error with all others as they are."""
        if sweeps:
            product = self._factor.damped() @ (self._w - self._values)
            for _ in range(sweeps):
                self._sweep(span, product)

    def _sweep(self, span: int, product: Tensor) -> None:
        """One look at each column in order. product: the damped Hessian's with what is left of the
        weight, kept up to date."""
        hessian, diagonal = self._factor.hessian, self._factor.diagonal
        damping = diagonal - hessian.diagonal()
        for columns in self._factor.order.split(span):
            moves = self._moved(columns, product[columns])
            product.addmm_(hessian[:, columns], moves, alpha=-1)
            product[columns] -= damping[columns, None] * moves

    def _moved(self, columns: Tensor, due: Tensor) -> Tensor:
        """How far the values of `columns` move [n, out], those before them in order moved already;
        due [n, out], consumed: the product's rows."""
        before, numbers = self._values[columns], columns.tolist()
        shares = (1 / self._factor.diagonal[columns]).tolist()

        def decide(i: int, slope: Tensor, move: Tensor) -> None:
            wish = torch.add(before[i], slope, alpha=shares[i])
            torch.sub(self._round(numbers[i], wish), before[i], out=move)

        moves = torch.empty_like(before)
        _in_turn(due, self._factor.hessian[columns][:, columns], decide, moves)
        return moves

    def result(self) -> BlocksResult:
        """What was chosen, as bytes."""
        codec, gap = self._codec, self._w - self._values
        error = (gap * (self._factor.damped() @ gap)).sum(0)
        if not all_finite(error):
            raise UserError(
                f"the weight, with what it makes up for, is too large for {codec.name}: its scales "
                "are float16; choose another type for this tensor"
            )
        codes = self._codes().T
        parts = [
            codec.pack(*self._fields[n], codes[:, n * codec.block : (n + 1) * codec.block])
            for n in range(codes.shape[1] // codec.block)
        ]
        return BlocksResult(torch.cat(parts, 1), error)

    def _choose(self, first: int, current: Tensor) -> None:
        """The scales of the block whose first column comes at `first`; current: its columns as they
        are by then, [block, out] in processing order."""
        codec = self._codec
        columns = self._factor.order[first : first + codec.block]
        number = self._order[first] // codec.block
        rows = torch.empty_like(current)
        rows[columns - number * codec.block] = current
        weight = self._factor.diagonal[number * codec.block : (number + 1) * codec.block]
        scales = fit_scales(rows.T.contiguous(), weight, codec)
        self._fields[number] = scales.fields
        count = codec.block // codec.sub
        steps = scales.step.T.contiguous()
        shifts = [None] * count if scales.shift is None else scales.shift.T.contiguous()
        for i, (step, shift) in enumerate(zip(steps, shifts, strict=True)):
            self._grids[number * count + i] = _Grid.of(step, shift)

    def _round(self, column: int, wish: Tensor) -> Tensor:
        """Note what `wish` [out] comes to for a column: the nearest values of its grid [out]."""
        grid = self._grids[column // self._codec.sub]
        return grid.value(self._codec.nearest(grid.scaled(wish))[1], self._rows[column])

    def _codes(self) -> Tensor:
        """Of the values, in memory order: [in, out] of code_dtype."""
        codes = torch.empty_like(self._values, dtype=self._codec.code_dtype)
        for sub, grid in self._grids.items():
            own = slice(sub * self._codec.sub, (sub + 1) * self._codec.sub)
            codes[own] = self._codec.nearest(grid.scaled(self._values[own]))[0]
        return codes


class _Grid(NamedTuple):
    """The grid of a sub-block in each row: value = step * level + shift, all float32 [out]; shift
    None: 0. inverse: 1 / step, 1 where that is 0; offset: -shift / step."""

    step: Tensor
    inverse: Tensor
    shift: Tensor | None
    offset: Tensor | None

    @classmethod
    def of(cls, step: Tensor, shift: Tensor | None) -> _Grid:
        inverse = 1 / torch.where(step == 0, 1.0, step)
        return cls(step, inverse, shift, None if shift is None else -shift * inverse)

    def scaled(self, x: Tensor) -> Tensor:
        """Weights [..., out] as levels that need not be whole."""
        if self.offset is None:
            return x * self.inverse
        return torch.addcmul(self.offset, x, self.inverse)

    def value(self, levels: Tensor, out: Tensor) -> Tensor:
        """The values of levels [out], into `out`."""
        if self.shift is None:
            return torch.mul(self.step, levels, out=out)
        return torch.addcmul(self.shift, self.step, levels, out=out)


def _in_turn(
    due: Tensor, coupling: Tensor, decide: Callable[[int, Tensor, Tensor], None], moves: Tensor
) -> None:
    """What columns come to, one after the other: decide(i, x_i, moves[i]) writes the move of column
    i where x_i = due[i] - the sum over j < i of coupling[j, i] * moves[j].

    due [n, out], consumed: from any multiple of INNER on it holds what is due by then; moves
    [n, out]; coupling [n, n].
    """
    for first in range(0, len(due), INNER):
        last = first + INNER
        inside, own = coupling[first:last, first:last], moves[first:last]
        for i in range(INNER):
            x = due[first + i]
            if i:
                x = torch.addmv(x, own[:i].T, inside[:i, i], alpha=-1)
            decide(first + i, x, own[i])
        if last < len(due):
            due[last:].addmm_(coupling[first:last, last:].T, own, alpha=-1)


def fit_scales(x: Tensor, weight: Tensor, codec: type[ScaledCodec]) -> Scales:
    """The scales of blocks x float32 [n, block], each column's error counted `weight` [block]
    times; in slices as Codec.encode does."""
    step = max(1, codec.slice_weights // codec.block)

    def fit(start: int) -> Scales:
        rows = x[start : start + step]
        return codec.fit(rows, weight.expand_as(rows)).scales

    parts = in_threads(fit, range(0, len(x), step))
    shifts = [p.shift for p in parts if p.shift is not None]
    fields = zip(*(p.fields for p in parts), strict=True)
    return Scales(
        torch.cat([p.step for p in parts]),
        torch.cat(shifts) if shifts else None,
        tuple(torch.cat(field) for field in fields),
    )
