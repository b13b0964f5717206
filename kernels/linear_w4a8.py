"""4-bit weights times inputs rounded to int8, on a CPU, for many rows: only where it is asked for.

`_weight_int4pack_mm_for_cpu` takes as long for 16 rows as a dense product of 60, and whole numbers
are multiplied several times as fast. So from MIN_ROWS rows on, inputs are rounded to int8 a token,
and the weight, of 4-bit codes with a scale for each group, to int8 with one for each row: eight
bits beside the four. That changes what the model says (docs/models.md), so it runs where it is
named and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import ActivationFormat
from .elements import int_elements
from .linear_int4 import INT4PACK_CPU
from .linear_ops import LinearKernel, LinearOperands, LinearProblem, dense_weight
from .linear_w8a8 import W8A8_CPU

MIN_ROWS = 8
TOKEN_INT8 = ActivationFormat(int_elements(8))
_INT4_TENSORS = 2


def by_rows(operands: LinearOperands, problem: LinearProblem) -> LinearOperands:
    """The weight [out, in] as int8 codes with one scale a row, float32 [out, 1]."""
    w = dense_weight(operands, problem, torch.float32)
    highest = TOKEN_INT8.elements.highest
    scale = (w.abs().amax(1, keepdim=True) / highest).clamp_min_(torch.finfo(w.dtype).tiny)
    return LinearOperands(w.div_(scale).round_().to(torch.int8), scale)


def _of_int8(problem: LinearProblem) -> LinearProblem:
    return problem._replace(
        num_bits=8, group_size=problem.in_features, symmetric=True, activation=TOKEN_INT8
    )


def _decline(problem: LinearProblem) -> str | None:
    if problem.batch_invariant:
        return "rounds inputs in some batches and not in others"
    if problem.activation is not None:
        return "is for inputs that the checkpoint does not quantize"
    return INT4PACK_CPU.decline(problem) or W8A8_CPU.decline(_of_int8(problem))


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    rounded = W8A8_CPU.pack(by_rows(operands, problem), _of_int8(problem))
    return *INT4PACK_CPU.pack(operands, problem), *rounded


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    if x.numel() < MIN_ROWS * problem.in_features:
        return INT4PACK_CPU.run(x, tensors[:_INT4_TENSORS], bias, problem)
    return W8A8_CPU.run(x, tensors[_INT4_TENSORS:], bias, _of_int8(problem))


W4A8_CPU = LinearKernel(
    "w4a8_cpu", _decline, _pack, _run, quantizes_input=True,
    note=f"inputs and weights rounded to int8 from {MIN_ROWS} rows on",
)  # fmt: skip
