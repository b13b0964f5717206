"""A linear module whose weight stays packed, in place of an nn.Linear."""

from __future__ import annotations

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

    Where the scheme quantizes input activations, x is quantized first. Where columns do not lie in
    the order of their groups (GPTQ's desc_act), they are moved there, and x is read in that order.
    """

    def __init__(
        self,
        module: str,
        quantized: Quantized,
        scheme: LayerScheme,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        device: torch.device,
        kernel: str | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        """Pack `quantized` for the first kernel that accepts it, or for the one named `kernel`.

        `bias` is the parameter of the linear that this one replaces; it may still be on meta.
        input_scale: [1], where the scheme stores one. Raises UserError when the shapes do not fit
        the scheme, and when `kernel` cannot run it.
        """
        super().__init__()
        self._columns: Tensor | None = None
        if quantized.g_idx is not None:
            try:
                quantized, self._columns = quantized.by_group()
            except UserError as e:
                raise UserError(f"{module}: {e}") from e
        shape = tuple(quantized.codes.shape)
        problem = linear_problem(module, scheme, shape, dtype, device)
        self.in_features, self.out_features = problem.in_features, problem.out_features
        chosen = choose_linear(problem, kernel)
        self.problem, self._kernel = problem, chosen.candidate
        self._input_scale = None if input_scale is None else input_scale.float()
        operands = _operands(module, quantized, problem, self._input_scale)
        self.tensors = self._kernel.pack(operands, problem)
        self.bias = bias
        nbytes = sum(t.nbytes for t in self.tensors)
        ordered = "" if self._columns is None else "inputs put in the order of their groups"
        note = "; ".join(n for n in (self._kernel.note, ordered) if n)
        self.report = LinearReport(
            module, self._kernel.name, problem, chosen.declined, nbytes, note
        )

    def forward(self, x: Tensor) -> Tensor:
        if self._columns is not None:
            x = x.index_select(-1, self._columns)
        activation = self.problem.activation
        if activation is not None and not self._kernel.quantizes_input:
            x = fake_quantize_activation(x, activation, self._input_scale)
        return self._kernel.run(x, self.tensors, self.bias, self.problem)

    def extra_repr(self) -> str:
        return f"{self.report.kernel}, {self.problem}"


def _operands(
    module: str, q: Quantized, problem: LinearProblem, input_scale: Tensor | None
) -> LinearOperands:
    """What `q` gives a kernel, scales and zero-points as [out, groups]."""
    if not problem.symmetric and q.zero_point is None:
        raise UserError(f"{module} is asymmetric but has no weight_zero_point")
    groups = -(-problem.in_features // problem.group_size)

    def by_rows(name: str, qparam: Tensor | None) -> Tensor | None:
        if qparam is None:
            return None
        if q.spec.block is not None:
            qparam = qparam.repeat_interleave(q.spec.block[0], dim=0)[: problem.out_features]
        if qparam.numel() == 1:
            return qparam.reshape(1, 1).expand(problem.out_features, groups).contiguous()
        if tuple(qparam.shape) != (problem.out_features, groups):
            raise UserError(
                f"{module}.{name} has shape {tuple(qparam.shape)}, but a weight of "
                f"{problem.out_features} x {problem.in_features} in groups of "
                f"{problem.group_size} needs {(problem.out_features, groups)}: the checkpoint is "
                "damaged"
            )
        return qparam

    scale = by_rows("weight_scale", q.scale)
    assert scale is not None
    zero_point = None if problem.symmetric else by_rows("weight_zero_point", q.zero_point)
    return LinearOperands(q.codes, scale, zero_point, q.global_scale, input_scale)
