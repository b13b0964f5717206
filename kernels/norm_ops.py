"""What stands between a layer's linears: RMS norm with the residual, and gated activations.

All of it is computed in float32 (float64 where x is) and rounded once. transformers rounds a norm's
quotient to the model's dtype before it multiplies the weight: with bfloat16 the last bit differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Choice, choose

Gate = Literal["silu", "gelu", "gelu_tanh"]


class Normed(NamedTuple):
    """out: the norm of x + residual. residual: that sum, in x's dtype; x where there was none."""

    out: Tensor
    residual: Tensor


class NormProblem(NamedTuple):
    """What decides which kernel can run. op: "rms_norm" or "gated_mul"; width: of a row."""

    op: str
    width: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class NormKernels:
    """One implementation of both ops, see their references."""

    name: str
    decline: Callable[[NormProblem], str | None]
    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], Normed]
    gated_mul: Callable[[Tensor, Gate], Tensor]


def wide_float(dtype: torch.dtype) -> torch.dtype:
    """What ops on `dtype` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Normed:
    """h / sqrt(mean h^2 + eps) * weight over the last axis, h = x + residual, x [..., n].

    weight: [n], any float dtype, as it multiplies: 1 has been added to Gemma's. The sum is rounded
    to x's dtype before it is normed, for that is what the next layer gets.
    """
    if residual is not None:
        x = x + residual
    wide = x.to(wide_float(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return Normed((normed * weight.to(wide.dtype)).to(x.dtype), x)


def gated_mul_reference(gate_up: Tensor, gate: Gate) -> Tensor:
    """act(g) * u of gate_up [..., 2 n], g its first n columns: [..., n]. "gelu_tanh" is GELU's
    approximation."""
    g, u = gate_up.to(wide_float(gate_up.dtype)).chunk(2, -1)
    if gate == "silu":
        active = F.silu(g)
    else:
        active = F.gelu(g, approximate="tanh" if gate == "gelu_tanh" else "none")
    return (active * u).to(gate_up.dtype)


@functools.cache
def norm_kernels() -> tuple[NormKernels, ...]:
    """The dispatch table, best first. The last one accepts everything."""
    from .norm_cpu import TORCH_CPU
    from .norm_triton import TRITON

    reference = NormKernels(
        "reference", lambda problem: None, rms_norm_reference, gated_mul_reference
    )
    return TRITON, TORCH_CPU, reference


def choose_norm(problem: NormProblem, force: str | None = None) -> Choice[NormKernels]:
    """The kernels that run `problem`; UserError when those named `force` cannot."""
    return choose(problem.op, norm_kernels(), problem, force)


@functools.lru_cache(maxsize=256)
def _chosen(problem: NormProblem, force: str | None) -> NormKernels:
    return choose_norm(problem, force).candidate


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, force: str | None = None
) -> Normed:
    """`rms_norm_reference` by the kernel that `choose_norm` takes."""
    problem = NormProblem("rms_norm", x.shape[-1], x.dtype, x.device.type)
    return _chosen(problem, force).rms_norm(x, weight, eps, residual)


def gated_mul(gate_up: Tensor, gate: Gate, force: str | None = None) -> Tensor:
    """`gated_mul_reference` by the kernel that `choose_norm` takes."""
    problem = NormProblem("gated_mul", gate_up.shape[-1], gate_up.dtype, gate_up.device.type)
    return _chosen(problem, force).gated_mul(gate_up, gate)
