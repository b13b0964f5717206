"""Decode attention over a compressed cache: multi-head latent attention (DeepSeek-V2,
arXiv:2405.04434) with its projections absorbed.

A token's entry is its latent vector of `rank` numbers and a rotated key of some more, which all
heads share; it is stored as one "head" in a pool of blocks. Keys are whole entries, values the
latent part of them. So the definition is that of paged attention with one kv head, whose values are
a part of its keys; what is special is that a kernel reads both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_ops import AttentionOptions, AttentionOutput, PagedBatch, attend
from .dispatch import Choice, choose
from .norm_ops import wide_float
from .paged_kv import BlockPool, PoolForm, gather_blocks


class LatentProblem(NamedTuple):
    """What decides which kernel can run; dtype, device: of the queries."""

    cache: PoolForm
    rank: int
    heads: int
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{self.heads} heads over latents of {self.rank} in {self.cache}"


@dataclass(frozen=True)
class LatentKernel:
    """One implementation. `decline(problem)`: None, or why it cannot run. `run`: as the reference,
    whose `scale` is that of the logits."""

    name: str
    decline: Callable[[LatentProblem], str | None]
    run: Callable[[Tensor, BlockPool, int, PagedBatch, float], AttentionOutput]


def mla_decode_reference(
    q: Tensor, cache: BlockPool, rank: int, batch: PagedBatch, scale: float
) -> AttentionOutput:
    """q [tokens, heads, rank + rotated], each head's query taken through the key's up-projection;
    cache: pool of one head of rank + rotated. Returns [tokens, heads, rank] in q's dtype, which
    the value's up-projection turns into heads, and the lse as paged attention does."""
    dtype = wide_float(q.dtype)
    out = q.new_empty(*q.shape[:2], rank)
    lse = torch.empty(q.shape[:2], device=q.device)
    starts = batch.cu_seqlens_q.tolist()
    for seq, length in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        blocks = batch.block_tables[seq : seq + 1, : -(-length // cache.block_size)]
        entries = gather_blocks(cache, blocks, dtype)[0, :, :length]
        part = attend(q[rows], entries, entries[..., :rank], AttentionOptions(scale))
        out[rows], lse[rows] = part
    return AttentionOutput(out, lse)


def mla_kernels() -> tuple[LatentKernel, ...]:
    """The dispatch table, best first. The last one accepts everything."""
    from .mla_cpu import SDPA_CPU
    from .mla_triton import TRITON

    reference = LatentKernel("reference", lambda problem: None, mla_decode_reference)
    return TRITON, SDPA_CPU, reference


def choose_mla(problem: LatentProblem, force: str | None = None) -> Choice[LatentKernel]:
    """The kernel that runs `problem`; UserError when the one named `force` cannot."""
    return choose("mla_decode", mla_kernels(), problem, force)


def mla_decode(
    q: Tensor,
    cache: BlockPool,
    rank: int,
    batch: PagedBatch,
    scale: float,
    force: str | None = None,
) -> AttentionOutput:
    """`mla_decode_reference` by the kernel that `choose_mla` takes."""
    problem = LatentProblem(cache.form, rank, q.shape[1], q.dtype, q.device.type)
    return choose_mla(problem, force).candidate.run(q, cache, rank, batch, scale)
