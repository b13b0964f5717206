"""The packed linear op: y = x @ W.T + bias, W stored as integer codes with scales.

The reference is the definition and the oracle: dequantize, then multiply. The other implementations
keep the codes packed; `choose_linear` takes the first that accepts, in the order of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .affine import dequantize_affine
from .dispatch import Choice, choose


class LinearProblem(NamedTuple):
    """What a packed linear is: everything that decides which kernel can run it.

    group_size: consecutive input columns that share a scale (in_features when a row has one scale).
    dtype, device: those of the activations.
    """

    num_bits: int
    group_size: int
    symmetric: bool
    in_features: int
    out_features: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class LinearKernel:
    """One implementation of the packed linear op.

    `decline(problem)`: None, or why this kernel cannot run it.
    `pack(codes, scale, zero_point, problem)`, the operands of kernels/affine.py: the tensors that
    `run` wants, in the kernel's own layout.
    `run(x [..., in], tensors, bias [out] | None, problem)`: y [..., out] in x's dtype.
    """

    name: str
    decline: Callable[[LinearProblem], str | None]
    pack: Callable[[Tensor, Tensor, Tensor | None, LinearProblem], tuple[Tensor, ...]]
    run: Callable[[Tensor, tuple[Tensor, ...], Tensor | None, LinearProblem], Tensor]


def linear_reference(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The definition: W is dequantized in float32, rounded once to x's dtype, and multiplied."""
    return F.linear(x, dequantize_affine(codes, scale, zero_point, x.dtype), bias)


def linear_kernels() -> tuple[LinearKernel, ...]:
    """The dispatch table, best first. The last one accepts everything."""
    from .linear_dequant import DEQUANT
    from .linear_int4 import INT4PACK_CPU
    from .linear_int8 import INT8PACK_CPU

    return INT4PACK_CPU, INT8PACK_CPU, DEQUANT


def choose_linear(problem: LinearProblem, force: str | None = None) -> Choice[LinearKernel]:
    """The kernel that runs `problem`; UserError when the one named `force` cannot."""
    return choose("linear", linear_kernels(), problem, force)
