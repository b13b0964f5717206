"""Latent attention on a CPU: torch's flash kernel with the entries as keys and as values, whose
rotated part is computed for nothing (an eighth) and cut off, but which are gathered once."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_cpu import attend_gathered
from .attention_ops import AttentionOptions, AttentionOutput, PagedBatch
from .mla_ops import LatentKernel, LatentProblem
from .paged_kv import BlockPool


def _decline(problem: LatentProblem) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    return "takes 16 and 32-bit floats" if problem.dtype == torch.float64 else None


def _run(
    q: Tensor, cache: BlockPool, rank: int, batch: PagedBatch, scale: float
) -> AttentionOutput:
    out, lse = attend_gathered(q, cache, None, batch, AttentionOptions(scale))
    return AttentionOutput(out[..., :rank], lse)


SDPA_CPU = LatentKernel("sdpa_cpu", _decline, _run)
