"""The packed linear op: y = x @ W.T + bias, W stored as codes with scales, x quantized or not.

The reference is the definition and the oracle: dequantize W, replace x by what its quantized form
is worth, multiply. The other implementations keep the codes packed or multiply whole numbers;
`choose_linear` takes the first that accepts, in the order of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .activations import ActivationFormat, fake_quantize_activation
from .affine import dequantize_affine, stored_scale_value
from .dispatch import Choice, choose
from .plain_linear import product_dtype, wide_linear


class LinearProblem(NamedTuple):
    """What a packed linear is: everything that decides which kernel can run it.

    group_size: consecutive input columns that share a scale (in_features when a row has one scale);
    the last group may be cut. dtype, device: those of the activations. kind: of the codes.
    activation: how inputs are quantized, None where they are not. batch_invariant: a token's result
    must have the same bits in every batch. taped: its model's layers run as a tape (kernels/tape).
    """

    num_bits: int
    group_size: int
    symmetric: bool
    in_features: int
    out_features: int
    dtype: torch.dtype
    device: str
    kind: Literal["int", "float"] = "int"
    activation: ActivationFormat | None = None
    batch_invariant: bool = False
    taped: bool = False


class LinearOperands(NamedTuple):
    """A quantized weight [out, in] and what its inputs are quantized with.

    codes: int8, or float8_e4m3fn. scale: [out, groups] as it is stored, see `stored_scale_value`;
    zero_point: int8 of its shape, None when symmetric. global_scale, input_scale: float32 [1].
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None

    def float_scale(self) -> Tensor:
        return stored_scale_value(self.scale, self.global_scale)


@dataclass(frozen=True)
class LinearKernel:
    """One implementation of the packed linear op.

    `decline(problem)`: None, or why this kernel cannot run it.
    `pack(operands, problem)`: the tensors that `run` wants, in the kernel's own layout.
    `run(x [..., in], tensors, bias [out] | None, problem)`: y [..., out] in x's dtype.
    `quantizes_input`: x comes as it is, and the kernel quantizes it itself where the problem asks
    for that; otherwise x comes fake-quantized.
    `note`: what the user should know of it, in few words.
    """

    name: str
    decline: Callable[[LinearProblem], str | None]
    pack: Callable[[LinearOperands, LinearProblem], tuple[Tensor, ...]]
    run: Callable[[Tensor, tuple[Tensor, ...], Tensor | None, LinearProblem], Tensor]
    quantizes_input: bool = False
    note: str = ""


def linear_reference(
    x: Tensor, operands: LinearOperands, bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    """The definition: W is dequantized in float32 and rounded once to x's dtype, so is the
    fake-quantized x; they are multiplied in it, or in float32 (`product_dtype`)."""
    if problem.activation is not None:
        x = fake_quantize_activation(x, problem.activation, operands.input_scale)
    w = dense_weight(operands, problem, x.dtype)
    return wide_linear(x, w.to(product_dtype(x.dtype, x.device.type)), bias)


def dense_weight(operands: LinearOperands, problem: LinearProblem, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that the codes stand for."""
    return dequantize_affine(
        operands.codes,
        operands.float_scale(),
        operands.zero_point,
        dtype,
        block=(1, problem.group_size),
    )


def linear_kernels() -> tuple[LinearKernel, ...]:
    """The dispatch table, best first. One accepts everything; what stands behind it changes what
    comes out, and runs where it is named."""
    from .linear_a8 import A8
    from .linear_dense import DENSE
    from .linear_dequant import DEQUANT
    from .linear_fp4 import FP4
    from .linear_int4 import INT4PACK_CPU
    from .linear_int8 import INT8PACK_CPU
    from .linear_int16 import INT16_CPU
    from .linear_w4a8 import W4A8_CPU
    from .linear_w8a8 import W8A8_CPU
    from .linear_wna16 import WNA16

    return (
        W8A8_CPU, INT16_CPU, INT4PACK_CPU, INT8PACK_CPU, A8, FP4, WNA16, DENSE, DEQUANT, W4A8_CPU
    )  # fmt: skip


def choose_linear(problem: LinearProblem, force: str | None = None) -> Choice[LinearKernel]:
    """The kernel that runs `problem`; UserError when the one named `force` cannot."""
    return choose("linear", linear_kernels(), problem, force)
