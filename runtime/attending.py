"""Attention of one layer over its blocks, as every decoder calls it, and who looks on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..kernels.attention_ops import AttentionOptions, PagedBatch, paged_attention
from ..kernels.paged_kv import BlockPool

Watch = Callable[[Tensor, BlockPool, Tensor, AttentionOptions], None]


@dataclass(frozen=True, eq=False)
class WatchedBatch(PagedBatch):
    """A batch whose queries and their `lse` are shown to `watch` in every layer: (q, keys, lse,
    options), see paged_attention."""

    watch: Watch


def attend_blocks(
    q: Tensor, keys: BlockPool, values: BlockPool, batch: PagedBatch, options: AttentionOptions
) -> Tensor:
    """What `paged_attention` gives, [tokens, heads, head_dim]."""
    if not isinstance(batch, WatchedBatch):
        return paged_attention(q, keys, values, batch, options).out
    attended = paged_attention(q, keys, values, batch, options._replace(wants_lse=True))
    batch.watch(q, keys, attended.lse, options)
    return attended.out
