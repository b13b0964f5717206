"""Make a solved weight better: least-squares scales and coordinate descent under the whole Hessian.

GPTQ decides each column once, before it knows what the later ones will do, and its scales before
any. Both can be looked at again with all else fixed, and each look lowers the same error,
tr((W - V) H (W - V)^T):

- the scales of a row jointly: V is linear in them, so they solve a small system (groups x groups);
- the codes, one column after the other (QuantEase, Behdin et al. 2023, arXiv:2309.01885): with
  P = (W - V) H, the best value of column j is v_j + P_j / H_jj, rounded to the nearest code.

Everything is held transposed, [in, out], as in the GPTQ solver, and updates beyond a block of
columns are delayed to one matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.affine import round_to_codes, values_of_codes
from ..quantized import Quantized, elements
from ..spec import Channel, Group

ROWS_A_CHUNK = 1 << 22  # elements of a chunk's temporaries in the systems for the scales
RIDGE = 1e-6  # share of a system's mean diagonal added to it: a group whose codes are all zero


def refine(
    w: Tensor, hessian: Tensor, start: Quantized, rounds: int, block_size: int = 64
) -> tuple[Quantized, Tensor]:
    """`start` with lower error against w [out, in], and each row's error float32 [out].

    hessian: float32 [in, in], damped as for GPTQ. rounds: of scales and codes, then scales again.
    """
    state = _State(w, hessian, start)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    for _ in range(rounds):
        state.refit_scales()
        state.descend(order, block_size)
    state.refit_scales()
    return state.quantized(), state.error()


class _State:
    """codes: centred, [in, out]. scale: [groups, out]. gap: W - V. product: H (W - V)."""

    def __init__(self, w: Tensor, hessian: Tensor, start: Quantized) -> None:
        assert isinstance(start.spec.granularity, Channel | Group), start.spec
        self._start, self._hessian, self._w = start, hessian, w.float().T.contiguous()
        columns = w.shape[1]
        self._size = columns // start.scale.shape[1]
        self._elements = elements(start.spec)
        self._scale = start.float_scale().T.contiguous()
        self._zero = None if start.zero_point is None else start.zero_point.float().T.contiguous()
        self._codes = start.codes.T.float().contiguous()
        self._measure()

    def refit_scales(self) -> None:
        """The scales of least error for the codes as they are, where they can be stored freely."""
        if self._start.scale.dtype.itemsize == 1:
            return
        groups, out = self._scale.shape
        centred = self._centred().view(groups, self._size, out)
        gradient = (centred * self._product.view(centred.shape)).sum(1)  # [groups, out]
        system = self._system(centred)  # [out, groups, groups]
        ridge = RIDGE * system.diagonal(dim1=1, dim2=2).mean(1).clamp_(min=1e-30)
        system.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        step, info = torch.linalg.solve_ex(system, gradient.T.unsqueeze(-1))
        scale = self._scale + step.squeeze(-1).T
        good = (info == 0) & torch.isfinite(scale).all(0)
        stored = scale.to(self._start.scale.dtype).float()
        tiny = torch.finfo(self._start.scale.dtype).tiny
        usable = good & torch.isfinite(stored) & (stored.abs() >= tiny)
        if self._zero is not None:
            usable &= stored > 0
        before = self._scale, self._gap, self._product, self.error()
        self._scale = torch.where(usable, stored, self._scale)
        self._measure()
        worse = self.error() > before[3]  # rounding of the scales took more than they gave
        for name, old in zip(("_scale", "_gap", "_product"), before, strict=False):
            setattr(self, name, torch.where(worse, old, getattr(self, name)))

    def descend(self, order: Tensor, block_size: int) -> None:
        """One sweep over all columns in `order`."""
        group_of = (order // self._size).tolist()
        diagonal = self._hessian.diagonal()
        for start in range(0, len(order), block_size):
            columns = order[start : start + block_size]
            inner = self._hessian[columns][:, columns]
            values, product = self._w[columns] - self._gap[columns], self._product[columns]
            codes, curvature = self._codes[columns], diagonal[columns]
            moves = torch.empty_like(values)
            for i in range(len(columns)):
                group = group_of[start + i]
                # the moves of this block's earlier columns, gathered when the column is due
                slope = torch.addmv(product[i], moves[:i].T, inner[:i, i], alpha=-1)
                wish = values[i] + slope / curvature[i]
                scale = self._scale[group]
                zero = None if self._zero is None else self._zero[group]
                codes[i] = round_to_codes(wish, scale, zero, self._elements)
                torch.sub(values_of_codes(codes[i], scale, zero), values[i], out=moves[i])
            self._codes[columns] = codes
            self._gap[columns] -= moves
            self._product.addmm_(self._hessian[:, columns], moves, alpha=-1)

    def error(self) -> Tensor:
        """Each row's share of tr((W - V) H (W - V)^T), [out]."""
        return (self._gap * self._product).sum(0)

    def quantized(self) -> Quantized:
        kept = self._codes.T.to(self._elements.dtype).contiguous()
        scale = self._start.scale
        if scale.dtype.itemsize > 1:
            scale = self._scale.T.to(scale.dtype).contiguous()
        return self._start._replace(codes=kept, scale=scale)

    def _centred(self) -> Tensor:
        if self._zero is None:
            return self._codes
        return self._codes - self._zero.repeat_interleave(self._size, 0)

    def _measure(self) -> None:
        scale = self._scale.repeat_interleave(self._size, 0)
        self._gap = self._w - self._centred() * scale
        self._product = self._hessian @ self._gap

    def _system(self, centred: Tensor) -> Tensor:
        """For each row, q_g H_gh q_h over its groups g, h: [out, groups, groups]."""
        groups, size, out = centred.shape
        system = centred.new_empty(out, groups, groups)
        rows = max(1, ROWS_A_CHUNK // (groups * size))
        for start in range(0, out, rows):
            chunk = centred[:, :, start : start + rows]
            for g in range(groups):
                columns = slice(g * size, (g + 1) * size)
                through = (self._hessian[:, columns] @ chunk[g]).view(chunk.shape)
                system[start : start + rows, g] = (through * chunk).sum(1).T
        return system
