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
from .gpu_speed import Speed, each
from .gpu_timer import copies_needed, seconds

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama 3 8B's
BATCHES = (
    (8, 32768), (1, 32768), (128, 4096), (16, 4096), (1, 4096), (128, 1024), (16, 1024), (1, 1024),
    (32, 32768), (128, 32768),
)  # fmt: skip
BARS = {"dense": 0.0, "fp8": 1.7, "int8": 1.7, "int4": 2.5}
BAR_CONTEXT = 32768  # bars hold from here on
BANDWIDTH_BAR = 0.8


def names() -> list[str]:
    """What `warm` and `speeds` take: sequences and keys of each, the most telling first."""
    return [f"{seqs} x {context}" for seqs, context in BATCHES]


def _asked(name: str) -> tuple[int, int]:
    seqs, _, context = name.partition(" x ")
    return int(seqs), int(context)


def warm(name: str) -> None:
    """Have compiled what `speeds(name)` runs; more sequences than 16 compile no other kernel."""
    seqs, context = _asked(name)
    for form in BARS:
        calls, _ = _calls(form, min(seqs, 16), context, copies=1)
        calls[0]()


def speeds(name: str) -> Iterator[Speed]:
    """The rows of the table for one of `names()`, by how keys and values are stored."""
    seqs, context = _asked(name)
    theirs = _sdpa_seconds(seqs, context)

    def measure(form: str) -> Speed:
        nonlocal theirs
        copies = copies_needed(seqs * context * KV_HEADS * HEAD_DIM)
        calls, moved = _calls(form, seqs, context, copies)
        ours, is_long = seconds(calls), context >= BAR_CONTEXT
        speed = Speed(
            f"decode {form}, {seqs} sequences", context, "paged_attention", ours, theirs, moved,
            4 * HEADS * HEAD_DIM * seqs * context, BARS[form] if is_long else 0.0,
            BANDWIDTH_BAR if is_long else 0.0,
        )  # fmt: skip
        theirs = ours if form == "dense" else theirs
        return speed

    yield from each(BARS, measure)


def _calls(
    form: str, seqs: int, context: int, copies: int
) -> tuple[list[Callable[[], object]], int]:
    """Attention on operands of `copies` kinds, and the bytes that one of them must move."""
    shape = PoolShape(form, seqs, context, KV_HEADS, HEAD_DIM, torch.bfloat16)
    options = AttentionOptions(HEAD_DIM**-0.5, rotated_queries=True)
    calls: list[Callable[[], object]] = []
    moved = 0
    for seed in range(copies):
        make = Maker("cuda", seed)
        o = {
            **pool_operands(make, "keys", shape),
            **pool_operands(make, "values", shape),
            **batch_operands(make, seqs, context),
        }
        q = make.normal(seqs, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        pools = [pool_of(o, name, form, HEAD_DIM) for name in ("keys", "values")]
        batch = batch_of(o, context, 1)
        moved = sum(pool.nbytes for pool in pools) + 2 * q.nbytes
        calls.append(
            lambda q=q, kv=pools, b=batch: paged_attention(q, kv[0], kv[1], b, options, "split")
        )
    return calls, moved


def _sdpa_seconds(seqs: int, context: int) -> float:
    """Of torch's attention, the query heads of a kv head as rows, so that nothing is repeated."""
    make = Maker("cuda")
    q = make.normal(seqs, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    pairs = [
        make.normal(2, seqs, KV_HEADS, context, HEAD_DIM, dtype=torch.bfloat16)
        for _ in range(copies_needed(seqs * context * KV_HEADS * HEAD_DIM))
    ]
    return seconds([lambda kv=kv: F.scaled_dot_product_attention(q, kv[0], kv[1]) for kv in pairs])
