"""A linear module whose weight stays packed, in place of one nn.Linear or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.activations import fake_quantize_activation
from ..kernels.errors import UserError
from ..kernels.linear_ops import LinearOperands, LinearProblem, choose_linear
from ..quantize.linear_problem import linear_problem
from ..quantize.quantized import Quantized
from ..quantize.spec import LayerScheme


class LinearReport(NamedTuple):
    """Which kernel runs a packed linear, and why those before it in the table do not.

    note: what the user should know of the kernel, "" for nothing.
    """

    module: str
    kernel: str
    problem: LinearProblem
    declined: dict[str, str]
    nbytes: int
    note: str = ""


class PackedLinear(nn.Module):
    """y = x @ W.T + bias, W in a kernel's own layout, x [..., in] in the problem's dtype.

    W may be several weights, one below the other, that `can_join` (runtime/fused.py). Where the
    scheme quantizes input activations, x is quantized first. Where columns do not lie in the order
    of their groups (GPTQ's desc_act), they are moved there, and x is read in that order.
    """

    def __init__(
        self,
        module: str,
        weights: Sequence[Quantized],
        scheme: LayerScheme,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        device: torch.device,
        kernel: str | None = None,
        input_scale: Tensor | None = None,
        batch_invariant: bool = False,
        taped: bool = False,
    ) -> None:
        """Pack `weights` for the first kernel that accepts them, or for the one named `kernel`.

        `bias` is the parameter of the linear that this one replaces; it may still be on meta, or
        be given later. input_scale: [1], where the scheme stores one. batch_invariant, taped: as
        of LinearProblem. Raises UserError when the
        shapes do not fit the scheme, and when `kernel` cannot run it.
        """
        super().__init__()
        self._columns: Tensor | None = None
        if weights[0].g_idx is not None:
            try:
                ordered = [q.by_group() for q in weights]
            except UserError as e:
                raise UserError(f"{module}: {e}") from e
            weights, self._columns = [q for q, _ in ordered], ordered[0][1]
        rows, columns = sum(len(q.codes) for q in weights), weights[0].codes.shape[1]
        problem = linear_problem(module, scheme, (rows, columns), dtype, device)
        problem = problem._replace(batch_invariant=batch_invariant, taped=taped)
        self.in_features, self.out_features = problem.in_features, problem.out_features
        chosen = choose_linear(problem, kernel)
        self.problem, self._kernel = problem, chosen.candidate
        self._input_scale = None if input_scale is None else input_scale.float()
        parts = [_operands(module, q, problem, self._input_scale) for q in weights]
        operands = parts[0] if len(parts) == 1 else _joined(parts)
        del parts, weights
        self.tensors = self._kernel.pack(operands, problem)
        self.bias = bias
        nbytes = sum(t.nbytes for t in self.tensors)
        order = "" if self._columns is None else "inputs put in the order of their groups"
        note = "; ".join(n for n in (self._kernel.note, order) if n)
        self.report = LinearReport(
            module, self._kernel.name, problem, chosen.declined, nbytes, note
        )

    @property
    def reorders(self) -> bool:
        """Whether columns are put in the order of their groups first."""
        return self._columns is not None

    def forward(self, x: Tensor) -> Tensor:
        if self._columns is not None:
            x = x.index_select(-1, self._columns)
        activation = self.problem.activation
        if activation is not None and not self._kernel.quantizes_input:
            x = fake_quantize_activation(x, activation, self._input_scale)
        return self._kernel.run(x, self.tensors, self.bias, self.problem)

    def reports(self, modules: Sequence[str], heights: Sequence[int]) -> list[LinearReport]:
        """The report of each linear that this one stands for, of so many rows."""
        whole = self.report
        if len(modules) == 1:
            return [whole]
        leaf = whole.module.rpartition(".")[2]
        note = "; ".join(n for n in (whole.note, f"one product, {leaf}") if n)
        return [
            whole._replace(
                module=module,
                problem=self.problem._replace(out_features=height),
                nbytes=whole.nbytes * height // self.out_features,
                note=note,
            )
            for module, height in zip(modules, heights, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"{self.report.kernel}, {self.problem}"


def has_own_threads(model: nn.Module) -> bool:
    """Whether packed linears of a model run on threads beside torch's (kernels/tape)."""
    linears = (m for m in model.modules() if isinstance(m, PackedLinear))
    return any(linear.report.kernel == "int16_cpu" for linear in linears)


def _operands(
    module: str, q: Quantized, problem: LinearProblem, input_scale: Tensor | None
) -> LinearOperands:
    """What `q`, all rows of a problem or some of them, gives a kernel: scales and zero-points as
    [rows, groups]."""
    if not problem.symmetric and q.zero_point is None:
        raise UserError(f"{module} is asymmetric but has no weight_zero_point")
    out, groups = len(q.codes), -(-problem.in_features // problem.group_size)

    def by_rows(name: str, qparam: Tensor | None) -> Tensor | None:
        if qparam is None:
            return None
        if q.spec.block is not None:
            qparam = qparam.repeat_interleave(q.spec.block[0], dim=0)[:out]
        if qparam.numel() == 1:
            return qparam.reshape(1, 1).expand(out, groups).contiguous()
        if tuple(qparam.shape) != (out, groups):
            raise UserError(
                f"{module}.{name} has shape {tuple(qparam.shape)}, but a weight of "
                f"{out} x {problem.in_features} in groups of {problem.group_size} needs "
                f"{(out, groups)}: the checkpoint is damaged"
            )
        return qparam

    scale = by_rows("weight_scale", q.scale)
    assert scale is not None
    zero_point = None if problem.symmetric else by_rows("weight_zero_point", q.zero_point)
    return LinearOperands(q.codes, scale, zero_point, q.global_scale, input_scale)


def _joined(parts: Sequence[LinearOperands]) -> LinearOperands:
    """The operands of weights one below the other."""
    zeros = [p.zero_point for p in parts if p.zero_point is not None]
    return parts[0]._replace(
        codes=torch.cat([p.codes for p in parts]),
        scale=torch.cat([p.scale for p in parts]),
        zero_point=torch.cat(zeros) if zeros else None,
    )
