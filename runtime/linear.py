"""A linear module whose weight stays packed, in place of an nn.Linear."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.errors import UserError
from ..kernels.linear_ops import LinearProblem, choose_linear
from ..quantize.quantized import Quantized
from ..quantize.spec import Channel, Group, QuantSpec, TensorWise


class LinearReport(NamedTuple):
    """Which kernel runs a packed linear, and why those before it in the table do not."""

    module: str
    kernel: str
    problem: LinearProblem
    declined: dict[str, str]
    nbytes: int


class PackedLinear(nn.Module):
    """y = x @ W.T + bias, W in a kernel's own packed layout. x [..., in] in the problem's dtype."""

    def __init__(
        self,
        module: str,
        quantized: Quantized,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        device: torch.device,
        kernel: str | None = None,
    ) -> None:
        """Pack `quantized` for the first kernel that accepts it, or for the one named `kernel`.

        `bias` is the parameter of the linear that this one replaces; it may still be on meta.
        Raises UserError when the shapes do not fit the spec, and when `kernel` cannot run it.
        """
        super().__init__()
        codes, spec = quantized.codes, quantized.spec
        problem = linear_problem(module, spec, tuple(codes.shape), dtype, device)
        self.in_features, self.out_features = problem.in_features, problem.out_features
        scale = _per_group(module, "weight_scale", quantized.scale, problem)
        zero_point = None
        if not spec.symmetric:
            if quantized.zero_point is None:
                raise UserError(f"{module} is asymmetric but has no weight_zero_point")
            zero_point = _per_group(module, "weight_zero_point", quantized.zero_point, problem)
        chosen = choose_linear(problem, kernel)
        self.problem = problem
        self.tensors = chosen.candidate.pack(codes, scale, zero_point, problem)
        self.bias = bias
        self._run = chosen.candidate.run
        nbytes = sum(t.nbytes for t in self.tensors)
        self.report = LinearReport(module, chosen.candidate.name, problem, chosen.declined, nbytes)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x, self.tensors, self.bias, self.problem)

    def extra_repr(self) -> str:
        return f"{self.report.kernel}, {self.problem}"


def linear_problem(
    module: str,
    spec: QuantSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> LinearProblem:
    """The kernel question that a weight of `shape` [out, in] stored as `spec` asks."""
    out_features, in_features = shape
    if spec.type != "int":
        raise UserError(f"{module} is stored as {spec.type}{spec.num_bits}, which is not run yet")
    match spec.granularity:
        case Group(size):
            group_size = size
        case Channel() | TensorWise():
            group_size = in_features
        case other:
            raise UserError(f"{module} has scales for each {other}, which is not run yet")
    if in_features % group_size:
        raise UserError(
            f"{module} has groups of {group_size} columns, which do not divide its {in_features}"
        )
    return LinearProblem(
        spec.num_bits, group_size, spec.symmetric, in_features, out_features, dtype, device.type
    )


def _per_group(module: str, name: str, qparam: Tensor, problem: LinearProblem) -> Tensor:
    """`qparam` as [out, groups]; UserError when it is neither that nor one number for all."""
    expected = (problem.out_features, problem.in_features // problem.group_size)
    if qparam.numel() == 1:
        return qparam.reshape(1, 1).expand(expected).contiguous()
    if tuple(qparam.shape) != expected:
        raise UserError(
            f"{module}.{name} has shape {tuple(qparam.shape)}, but a weight of "
            f"{problem.out_features} x {problem.in_features} in groups of {problem.group_size} "
            f"needs {expected}: the checkpoint is damaged"
        )
    return qparam
