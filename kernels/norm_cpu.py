"""RMS norm and gated activations by torch's own CPU kernels.

The activation is rounded to the input's dtype before it is multiplied, as transformers does: with
bfloat16 the error is 0.24% (relative RMS) rather than 0.17%, in half the time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .norm_ops import Gate, Normed, NormKernels, NormProblem


def _decline(problem: NormProblem) -> str | None:
    return None if problem.device == "cpu" else f"runs on cpu, not {problem.device}"


def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    if residual is not None:
        x = x + residual
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    return Normed(torch.rms_norm(x, weight.shape, weight, eps), x)


def _gated_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    g, u = gate_up.chunk(2, -1)
    if gate == "silu":
        return F.silu(g).mul_(u)
    return F.gelu(g, approximate="tanh" if gate == "gelu_tanh" else "none").mul_(u)


TORCH_CPU = NormKernels("torch_cpu", _decline, _rms_norm, _gated_mul)
