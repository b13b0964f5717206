"""Speed of decode attention over blocks on a GPU, by how keys and values are stored.

Unquantized blocks are measured against torch's SDPA on contiguous keys and values, quantized ones
against our own kernel on unquantized blocks: that is what storing fewer bits must gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ..kernels.attention_ops import AttentionOptions
from ..kernels.cases.case import Maker
from ..kernels.cases.pools import PoolShape, batch_of, batch_operands, pool_of, pool_operands
from ..kernels.triton_ops.paged_attention import paged_attention
from .gpu_speed import Ceilings, Speed
from .gpu_timer import copies_needed, seconds

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama 3 8B's
BATCHES = ((1, 32768), (8, 32768), (1, 4096), (16, 4096), (128, 4096), (128, 1024), (32, 1024))
BARS = {"dense": 0.0, "fp8": 1.7, "int8": 1.7, "int4": 2.5}
BAR_CONTEXT = 32768  # bars hold from here on
BANDWIDTH_BAR = 0.8


def speeds(ceilings: Ceilings) -> Iterator[Speed]:
    """The rows of the table, the most telling first."""
    for seqs, context in BATCHES:
        dense = _measure("dense", seqs, context, _sdpa_seconds(seqs, context))
        yield dense
        for form in ("int8", "fp8", "int4"):
            yield _measure(form, seqs, context, dense.ours)


def _measure(form: str, seqs: int, context: int, theirs: float) -> Speed:
    shape = PoolShape(form, seqs, context, KV_HEADS, HEAD_DIM, torch.bfloat16)
    options = AttentionOptions(HEAD_DIM**-0.5, rotated_queries=True)
    values = seqs * context * KV_HEADS * HEAD_DIM
    calls: list[Callable[[], object]] = []
    moved = 0
    for seed in range(copies_needed(values)):
        make = Maker("cuda", seed)
        o = {
            **pool_operands(make, "keys", shape),
            **pool_operands(make, "values", shape),
            **batch_operands(make, seqs, context, 1),
        }
        q = make.normal(seqs, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        keys, stored = (pool_of(o, name, form, HEAD_DIM) for name in ("keys", "values"))
        batch = batch_of(o, context, 1)
        moved = keys.nbytes + stored.nbytes + 2 * q.nbytes
        calls.append(
            lambda q=q, k=keys, v=stored, b=batch: paged_attention(q, k, v, b, options, "split")
        )
    long = context >= BAR_CONTEXT
    return Speed(
        f"decode {form}, {seqs} sequences", context, "paged_attention", seconds(calls), theirs,
        moved, 4 * HEADS * HEAD_DIM * seqs * context, BARS[form] if long else 0.0,
        BANDWIDTH_BAR if long else 0.0,
    )  # fmt: skip


def _sdpa_seconds(seqs: int, context: int) -> float:
    """Of torch's attention, the query heads of a kv head as rows, so that nothing is repeated."""
    make = Maker("cuda")
    q = make.normal(seqs, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    pairs = [
        make.normal(2, seqs, KV_HEADS, context, HEAD_DIM, dtype=torch.bfloat16)
        for _ in range(copies_needed(seqs * context * KV_HEADS * HEAD_DIM))
    ]
    return seconds([lambda kv=kv: F.scaled_dot_product_attention(q, kv[0], kv[1]) for kv in pairs])
