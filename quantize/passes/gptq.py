"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) with what practice added.

Columns are rounded one after the other; the error of each is spread over the columns not yet
rounded so that the layer's output on the calibration inputs changes least. With H = X^T X and
U the upper Cholesky factor of H^-1 (H^-1 = U^T U), rounding column j with error e = (w_j - q_j) /
U_jj subtracts e * U_j,k from every later column k.

This form: static activation order (columns in falling order of H's diagonal, groups stay in memory
order, no g_idx; desc_act, where groups follow that order too, is the same problem with its columns
moved), scales searched under that diagonal and fixed before the first column. Rows do not
interact, so linears that share an input are stacked and solved at once. The weight is held
transposed, [in, out], so that a column of the paper is a contiguous row here; updates beyond a
block of columns are delayed to one matrix product ("lazy batch updates").
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.affine import expand_groups, round_to_codes, values_of_codes
from ...kernels.errors import UserError
from ...kernels.finite import all_finite
from ...kernels.triangular import cholesky_, invert_lower_, reordered, reverse_
from ..quantized import Quantized, elements, plain_g_idx
from ..ranges import QParams, choose_qparams, scale_store
from ..spec import Block, Group, QuantSpec
from .refine import refine
from .settings import MAX_DAMP, GPTQSettings

ROWS_A_CHUNK = 1024  # of a weight, whose products with H are temporaries
ENERGY_STRIPS = 6  # the upper half of H in strips, as a Gram matrix is summed


class Factor(NamedTuple):
    """A factored Hessian, shared by every linear that reads the same input.

    hessian float32 [in, in]: as it was given. order int64 [in]: columns in processing order. u
    float32 [in, in]: upper Cholesky factor of the inverse of the damped, reordered Hessian.
    diagonal float32 [in]: the damped diagonal, memory order. dampening_frac: the share that made
    the factorization succeed. dead: number of columns whose input was always zero.
    """

    hessian: Tensor
    order: Tensor
    u: Tensor
    diagonal: Tensor
    dampening_frac: float
    dead: int

    def damped(self) -> Tensor:
        """The Hessian with the diagonal that was factored."""
        return torch.diagonal_scatter(self.hessian, self.diagonal)


class GPTQResult(NamedTuple):
    """quantized: the codes and scales. error: float32 [out], each row's sum of squared output
    differences over the calibration tokens divided by their number, as far as H tells."""

    quantized: Quantized
    error: Tensor


class Solved(NamedTuple):
    """quantized, error: as of GPTQResult. energy: float32 [out], what `output_energy` says of the
    weight. dampening_frac, dead: as of Factor."""

    quantized: Quantized
    error: Tensor
    energy: Tensor
    dampening_frac: float
    dead: int


def solve(
    w: Tensor,
    hessian: Tensor,
    shift: Tensor | None,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
    settings: GPTQSettings,
) -> Solved:
    """Quantize w float32 [out, in] against the Hessian of its input; both are left as they are.

    shift: float32 [in, in], how the input has moved (`corrected_weight`), where the settings want
    it made up for. Raises UserError as `factor_hessian` and `gptq_quantize` do.
    """
    factor, aim = factor_hessian(hessian, settings), w
    if shift is not None and settings.input_correction:
        aim = corrected_weight(w, factor, shift, settings.input_correction)
    quantized, error = gptq_quantize(aim, factor, spec, scale_dtype, settings)
    energy = output_energy(w, hessian)
    return Solved(quantized, error, energy, factor.dampening_frac, factor.dead)


def factor_hessian(hessian: Tensor, settings: GPTQSettings, order: Tensor | None = None) -> Factor:
    """Damp, reorder and factor `hessian` float32 [in, in] (mean of x x^T over tokens).

    order: int64 [in], a processing order in place of the settings' own. Raises the damping tenfold
    and retries when the factorization fails; UserError past MAX_DAMP.
    """
    if not all_finite(hessian):
        raise UserError("the Hessian holds NaN or infinite values: check the model's weights")
    diagonal = hessian.diagonal().clone()
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if not dead.all() else diagonal.new_tensor(1.0)
    diagonal[dead] = mean
    if order is not None:
        assert order.shape == diagonal.shape, order.shape
    elif settings.act_order != "none":
        order = torch.argsort(diagonal.masked_fill(dead, 0), descending=True, stable=True)
    else:
        order = torch.arange(len(diagonal), device=hessian.device)
    damp = settings.dampening_frac
    while True:
        u = _inverse_factor(hessian, diagonal + damp * mean, order)
        if u is not None:
            return Factor(hessian, order, u, diagonal + damp * mean, damp, int(dead.sum()))
        damp *= 10
        if damp > MAX_DAMP:
            raise UserError(
                f"the Hessian is not positive definite even with {damp / 10:g} of its mean "
                "diagonal added; use more calibration samples"
            )


def _inverse_factor(hessian: Tensor, diagonal: Tensor, order: Tensor) -> Tensor | None:
    """Upper U with U^T U = h^-1, or None when h is not positive definite; h: the Hessian with this
    diagonal, in this order.

    With J the reversal of rows and columns, J h J = L L^T gives h = R R^T for the upper R = J L J,
    so U = R^-1 = J L^-1 J: one factorization and one triangular inverse, all where J h J lay.
    """
    backwards = order.flip(0)
    u = reordered(hessian, backwards)
    u.diagonal().copy_(diagonal[backwards])
    if not cholesky_(u):
        return None
    reverse_(invert_lower_(u))
    return u if all_finite(u) else None


def output_energy(w: Tensor, hessian: Tensor) -> Tensor:
    """float32 [out]: the mean square of each output of w float32 [out, in], as far as the symmetric
    `hessian` tells. Of the products of two columns each is computed once, and counted twice."""
    columns = w.shape[1]
    strip = -(-columns // ENERGY_STRIPS)
    energy = w.new_zeros(len(w), dtype=torch.float32)
    for rows, total in zip(w.split(ROWS_A_CHUNK), energy.split(ROWS_A_CHUNK), strict=True):
        for i in range(0, columns, strip):
            own, right = rows[:, i : i + strip], rows[:, i + strip :]
            product = own @ hessian[i : i + strip, i : i + strip]
            product.addmm_(right, hessian[i + strip :, i : i + strip], alpha=2)
            total += product.mul_(own).sum(1)
    return energy


def corrected_weight(w: Tensor, factor: Factor, shift: Tensor, strength: float) -> Tensor:
    """The weight whose outputs on the quantized inputs x are nearest to those of w [out, in] on the
    float model's inputs f (GPTAQ, Li et al. 2025, arXiv:2504.02692).

    Its aim, sum ||W f - W' x||^2, is least for W' = W (H + D) H^-1 with D = mean (f - x) x^T,
    `shift` float32 [in, in]. strength: how far it goes, from 0 to 1. (GPTAQ corrects column by
    column while it rounds; here the aim moves before the first one.)
    """
    u = factor.u  # H^-1 = u^T u in processing order
    moved = (w.float() @ shift)[:, factor.order]
    step = torch.empty_like(moved)
    step[:, factor.order] = (moved @ u.T) @ u
    return w.float() + strength * step


def gptq_quantize(
    w: Tensor,
    factor: Factor,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
    settings: GPTQSettings,
) -> GPTQResult:
    """Quantize w [out, in] (any float dtype) against a factored Hessian of its input.

    Scales are stored in `scale_dtype`. Deterministic; `w` is not changed.
    """
    if not all_finite(w):
        raise UserError("the weight holds NaN or infinite values: the model is damaged")
    if settings.act_order == "desc_act":
        return _grouped_by_order(w, factor, spec, scale_dtype, settings)
    columns = w.shape[1]
    size = _columns_a_group(spec, columns)
    importance = factor.diagonal if settings.scale_search == "hessian" else None
    store = scale_store(w, spec, scale_dtype)
    table = _Table(choose_qparams(w, spec, scale_dtype, importance, store), w.shape[0], spec)
    working = w.float().T[factor.order].contiguous()  # [in, out], consumed
    kept = elements(spec).dtype
    codes = torch.empty_like(working, dtype=kept)
    error = torch.zeros(w.shape[0], device=w.device)
    block = settings.block_size
    if not settings.static_groups:  # a group must not straddle a delayed update
        block = max(size, block // size * size)
    group_of = (factor.order // size).tolist()
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        chunk = working[start:stop]
        errors = torch.empty_like(chunk)
        u = factor.u[start:stop, start:stop]
        for i in range(stop - start):
            group = group_of[start + i]
            if not settings.static_groups and (start + i) % size == 0:
                current = chunk[i : i + size] - u[:i, i : i + size].T @ errors[:i]
                h = None if importance is None else importance[start + i : start + i + size]
                table.replace(group, choose_qparams(current.T, spec, scale_dtype, h, store))
            # the errors of this block's earlier columns, gathered when the column is due
            column = torch.addmv(chunk[i], errors[:i].T, u[:i, i], alpha=-1)
            rounded, value = table.round(column, group)
            codes[start + i] = rounded.to(kept)
            torch.sub(column, value, out=errors[i]).div_(u[i, i])
        error += errors.square().sum(0)
        if stop < columns:
            working[stop:].addmm_(factor.u[start:stop, stop:].T, errors, alpha=-1)
    restored = torch.empty_like(codes)
    restored[factor.order] = codes
    params = table.params
    quantized = Quantized(
        restored.T.contiguous(), params.scale, params.zero_point, spec, params.global_scale
    )
    if settings.refine_rounds:
        return GPTQResult(*refine(w, factor.damped(), quantized, settings.refine_rounds))
    return GPTQResult(quantized, error)


def _grouped_by_order(
    w: Tensor,
    factor: Factor,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
    settings: GPTQSettings,
) -> GPTQResult:
    """Groups of columns that follow each other in processing order, told by g_idx."""
    order = factor.order
    moved = factor._replace(
        hessian=reordered(factor.hessian, order),
        order=torch.arange(len(order), device=order.device),
        diagonal=factor.diagonal[order],
    )
    settings = replace(settings, act_order="none")
    q, error = gptq_quantize(w[:, order], moved, spec, scale_dtype, settings)
    codes, g_idx = torch.empty_like(q.codes), plain_g_idx(len(order), spec).to(order.device)
    codes[:, order], moved_idx = q.codes, torch.empty_like(g_idx)
    moved_idx[order] = g_idx
    in_order = torch.equal(moved_idx, g_idx)
    return GPTQResult(q._replace(codes=codes, g_idx=None if in_order else moved_idx), error)


def _columns_a_group(spec: QuantSpec, columns: int) -> int:
    match spec.granularity:
        case Group(size):
            return size
        case Block(_, width):
            return width
    return columns


class _Table:
    """Scales and zero-points in float32 as [groups, out]: a column's are one contiguous row."""

    def __init__(self, params: QParams, rows: int, spec: QuantSpec) -> None:
        self.params, self._elements = params, elements(spec)
        tall = None if spec.block is None else (spec.block[0], 1)
        groups = params.scale.shape[1]

        def table(qparam: Tensor) -> Tensor:
            expanded = expand_groups(qparam.float(), rows, groups, tall)
            return expanded.expand(rows, groups).T.contiguous()

        self._scale = table(params.float_scale())
        self._zero = None if params.zero_point is None else table(params.zero_point)

    def replace(self, group: int, params: QParams) -> None:
        """Put the scales of one group, [out, 1], in place of `group`'s."""
        self._scale[group] = params.float_scale()[:, 0]
        self.params.scale[:, group] = params.scale[:, 0]
        if self._zero is not None and params.zero_point is not None:
            assert self.params.zero_point is not None
            self._zero[group] = params.zero_point[:, 0]
            self.params.zero_point[:, group] = params.zero_point[:, 0]

    def round(self, column: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Codes and values, float32 [out], of a column [out]."""
        scale = self._scale[group]
        zero = None if self._zero is None else self._zero[group]
        codes = round_to_codes(column, scale, zero, self._elements)
        return codes, values_of_codes(codes, scale, zero)
