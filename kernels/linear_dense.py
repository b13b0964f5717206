"""Linear with float codes by dequantizing them once, when the model is loaded.

Neither a CPU nor torch's own ops multiply 8- or 4-bit floats at any speed (`_scaled_mm` on a CPU
converts on every call: 60 ms for a matrix that takes 1.5 ms in bfloat16), so the weight is held in
the activations' dtype: the memory and the speed of the unquantized model, the values of the
quantized one. The kernel `dequant` keeps the codes instead and pays on every call.
"""

from __future__ import annotations

from torch import Tensor

from .linear_ops import LinearKernel, LinearOperands, LinearProblem, dense_weight
from .plain_linear import PlainKernel, PlainProblem, choose_plain


def _decline(problem: LinearProblem) -> str | None:
    return None if problem.kind == "float" else "is for float codes; whole numbers stay packed"


def _plain(problem: LinearProblem) -> PlainKernel:
    plain = PlainProblem(
        problem.dtype, problem.device, problem.batch_invariant, problem.in_features
    )
    return choose_plain(plain).candidate


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    return (_plain(problem).pack(dense_weight(operands, problem, problem.dtype)),)


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    return _plain(problem).run(x, tensors[0], bias)


DENSE = LinearKernel("dense", _decline, _pack, _run, note="dequantized when loaded")
