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

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ...kernels.finite import all_finite
from ..passes.gptq import Factor
from .blocks.base import in_threads
from .blocks.scaled import ScaledCodec, Scales

LAZY = 128  # columns between two updates of all that follow, or one block where that is more


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
    for _ in range(sweeps):
        state.sweep(span)
    return state.result()


class _State:
    """working: weights in processing order, consumed. step, shift: float32 [sub-blocks, out].
    codes, values: [in, out], memory order. fields: of each block's scales, by its number."""

    def __init__(self, w: Tensor, factor: Factor, codec: type[ScaledCodec]) -> None:
        out, columns = w.shape
        self._factor, self._codec = factor, codec
        self._w = w.float().T
        self._working = self._w[factor.order].contiguous()
        self._order = factor.order.tolist()
        self._step = w.new_empty(columns // codec.sub, out, dtype=torch.float32)
        self._shift: Tensor | None = None
        self._codes = torch.empty(columns, out, dtype=codec.code_dtype, device=w.device)
        self._values = torch.empty_like(self._working)
        self._fields: dict[int, tuple[Tensor, ...]] = {}

    def solve(self, start: int, stop: int) -> None:
        """Columns start .. stop of the order, whole blocks; then what follows makes up for them."""
        block, u = self._codec.block, self._factor.u
        chunk, within = self._working[start:stop], u[start:stop, start:stop]
        errors = torch.empty_like(chunk)
        for i in range(stop - start):
            if i % block == 0:
                ahead = slice(i, i + block)
                self._choose(start + i, chunk[ahead] - within[:i, ahead].T @ errors[:i])
            column = torch.addmv(chunk[i], errors[:i].T, within[:i, i], alpha=-1)
            value = self._round(self._order[start + i], column)
            torch.sub(column, value, out=errors[i]).div_(within[i, i])
        if stop < len(u):
            self._working[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1)

    def sweep(self, span: int) -> None:
        """Every code once more, in order: the one of least error with all others as they are."""
        hessian, diagonal = self._factor.hessian, self._factor.diagonal
        product = self._factor.damped() @ (self._w - self._values)
        for columns in self._factor.order.split(span):
            inner = hessian[columns][:, columns]
            before, due = self._values[columns], product[columns]
            moves = torch.empty_like(before)
            for i, column in enumerate(columns.tolist()):
                slope = torch.addmv(due[i], moves[:i].T, inner[:i, i], alpha=-1)
                value = self._round(column, before[i] + slope / diagonal[column])
                torch.sub(value, before[i], out=moves[i])
            product.addmm_(hessian[:, columns], moves, alpha=-1)
            product[columns] -= (diagonal - hessian.diagonal())[columns, None] * moves

    def result(self) -> BlocksResult:
        """What was chosen, as bytes."""
        codec, gap = self._codec, self._w - self._values
        error = (gap * (self._factor.damped() @ gap)).sum(0)
        if not all_finite(error):
            raise UserError(
                f"the weight, with what it makes up for, is too large for {codec.name}: its scales "
                "are float16; choose another type for this tensor"
            )
        codes = self._codes.T
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
        subs = slice(number * codec.block // codec.sub, (number + 1) * codec.block // codec.sub)
        self._step[subs] = scales.step.T
        if scales.shift is not None:
            if self._shift is None:
                self._shift = torch.empty_like(self._step)
            self._shift[subs] = scales.shift.T

    def _round(self, column: int, wish: Tensor) -> Tensor:
        """Note the codes nearest to `wish` [out] for a column; their values [out]."""
        sub = column // self._codec.sub
        step, shift = self._step[sub], None if self._shift is None else self._shift[sub]
        scaled = (wish if shift is None else wish - shift) / torch.where(step == 0, 1.0, step)
        self._codes[column], levels = self._codec.nearest(scaled)
        value = step * levels if shift is None else step * levels + shift
        self._values[column] = value
        return value


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
