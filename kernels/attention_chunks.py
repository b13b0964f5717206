"""Paged attention whose rows come out alike in every batch: products of one fixed shape.

A sequence's new tokens are taken in tiles of QUERIES, its keys in chunks of KEYS counted from its
beginning, so neither who else is in the batch, nor how a prompt was cut, nor how many tokens are
verified at once changes what is multiplied and in what order it is summed (running softmax of
Milakov and Gimelshein, arXiv:1805.02867). A chunk that a token does not see adds exact zeros. It is
computed in float32, in float64 where q is. Batches that are `batch_invariant` run on it where no
GPU kernel takes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_ops import (
    AttentionKernel,
    AttentionOptions,
    AttentionOutput,
    AttentionProblem,
    PagedBatch,
)
from .kv_quant import rotate_heads
from .paged_kv import BlockPool, gather_blocks

QUERIES = 8  # new tokens of one sequence in a tile
KEYS = 128  # of a chunk, as long as blocks are not longer


class _Tiles(NamedTuple):
    """The tiles of a batch. rows: int64 [tiles, QUERIES], tokens in q, its length where a tile has
    none. position: int64 [tiles, QUERIES], theirs in their sequences, -1 for none. chunks: those
    that some tile sees."""

    rows: Tensor
    position: Tensor
    chunks: list[_Chunk]


class _Chunk(NamedTuple):
    """Chunk `number` of every sequence that is long enough. tiles: int64 [n], those that see it.
    tables: int64 [n, blocks], its blocks."""

    number: int
    tiles: Tensor
    tables: Tensor


def _decline(problem: AttentionProblem) -> str | None:
    return None if problem.batch_invariant else "is for batch_invariant"


def attend_chunks(
    q: Tensor, keys: BlockPool, values: BlockPool, batch: PagedBatch, options: AttentionOptions
) -> AttentionOutput:
    """`paged_attention_reference`, each row alike in every batch."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype, (tokens, heads, _) = q.dtype, q.shape
    if options.rotated_queries and keys.fmt is not None and keys.fmt.rotate:
        q = rotate_heads(q.to(dtype))  # gathered keys are turned back
    blocks = max(1, KEYS // keys.block_size)  # of a chunk
    tiles = batch.once(
        ("chunks", options.sliding_window), lambda: _tiles(batch, keys, options, blocks)
    )
    count, kv_heads = len(tiles.rows), keys.kv_heads
    taken = F.pad(q.to(dtype), (0, 0, 0, 0, 0, 1))[tiles.rows]  # a row of zeros stands for none
    queries = taken.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    shape = (count, kv_heads, queries.shape[2])
    acc = queries.new_zeros(*shape, values.head_dim)
    largest = queries.new_full(shape, -torch.inf)
    total = queries.new_zeros(shape)
    for number, here, tables in tiles.chunks:
        k, v = (gather_blocks(pool, tables, dtype) for pool in (keys, values))
        key = number * k.shape[2] + torch.arange(k.shape[2], device=q.device)
        distance = tiles.position[here][:, :, None] - key
        logits = _logits(queries[here], k, distance, options)
        before = largest[here]
        now = torch.maximum(before, logits.amax(-1))
        shift = torch.where(now == -torch.inf, 0.0, now)
        weights = torch.exp(logits - shift.unsqueeze(-1))
        shrink = torch.exp(torch.where(before == -torch.inf, -torch.inf, before - shift))
        largest[here] = now
        total[here] = total[here] * shrink + weights.sum(-1)
        seen_by_any = (distance >= 0).any(1)[:, None, :, None]
        added = torch.bmm(weights.flatten(0, 1), v.masked_fill(~seen_by_any, 0.0).flatten(0, 1))
        acc[here] = acc[here] * shrink.unsqueeze(-1) + added.view(len(here), *acc.shape[1:])
    lse = largest + torch.log(total)
    out = acc / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return _put_back(out, lse, tiles, (tokens, heads), out_dtype, options)


def _logits(queries: Tensor, k: Tensor, distance: Tensor, options: AttentionOptions) -> Tensor:
    """[tiles, kv_heads, shared * QUERIES, keys]. queries: [tiles, kv_heads, shared * QUERIES,
    head_dim]; distance: how far behind each token a key lies, [tiles, QUERIES, keys]."""
    tiles, kv_heads, rows, _ = queries.shape
    logits = torch.bmm(queries.flatten(0, 1), k.mT.flatten(0, 1)).view(tiles, kv_heads, rows, -1)
    logits = logits * options.scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    by_head = logits.unflatten(2, (-1, QUERIES))  # [tiles, kv_heads, shared, QUERIES, keys]
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(logits.dtype).view(1, kv_heads, -1, 1, 1)
        by_head = by_head - slopes * distance[:, None, None]
    seen = distance >= 0
    if options.sliding_window is not None:
        seen &= distance < options.sliding_window
    return by_head.masked_fill(~seen[:, None, None], -torch.inf).flatten(2, 3)


def _put_back(
    out: Tensor,
    lse: Tensor,
    tiles: _Tiles,
    shape: tuple[int, int],
    dtype: torch.dtype,
    options: AttentionOptions,
) -> AttentionOutput:
    """The tiles' rows where their tokens are. shape: tokens and heads of q."""
    tokens, heads = shape
    real = tiles.rows < tokens
    at = tiles.rows[real]
    rows = out.unflatten(2, (-1, QUERIES)).permute(0, 3, 1, 2, 4).flatten(2, 3)[real]
    sums = lse.unflatten(2, (-1, QUERIES)).permute(0, 3, 1, 2).flatten(2, 3)[real].float()
    if options.sinks is not None:
        whole = torch.logaddexp(sums, options.sinks)
        rows, sums = rows * torch.exp(sums - whole).unsqueeze(-1).to(rows.dtype), whole
    result = torch.zeros(tokens, heads, out.shape[-1], dtype=dtype, device=out.device)
    lses = torch.full((tokens, heads), -torch.inf, device=out.device)
    if options.sinks is not None:
        lses = options.sinks.expand(tokens, heads).clone()
    result[at], lses[at] = rows.to(dtype), sums
    return AttentionOutput(result, lses)


def _tiles(batch: PagedBatch, keys: BlockPool, options: AttentionOptions, blocks: int) -> _Tiles:
    """blocks: of a chunk."""
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
    none, device = starts[-1], batch.block_tables.device
    rows: list[list[int]] = []
    position: list[list[int]] = []
    seqs: list[int] = []
    for seq, length in enumerate(lengths):
        begin, end = starts[seq], starts[seq + 1]
        ahead = length - end  # of a token's number, its position
        for at in range(begin, end if length else begin, QUERIES):
            here = list(range(at, min(at + QUERIES, end)))
            empty = QUERIES - len(here)
            rows.append(here + [none] * empty)
            position.append([row + ahead for row in here] + [-1] * empty)
            seqs.append(seq)
    at = torch.tensor(position, dtype=torch.int64, device=device).view(-1, QUERIES)
    size = blocks * keys.block_size
    lowest = torch.where(at < 0, at.amax(1, keepdim=True), at).amin(1)
    if options.sliding_window is None:
        lowest = torch.zeros_like(lowest)
    else:
        lowest = (lowest - options.sliding_window + 1).clamp_(min=0)
    first, last = lowest // size, at.amax(1) // size
    tables = batch.block_tables[torch.tensor(seqs, dtype=torch.int64, device=device)].long()
    count = int(last.max()) + 1 if seqs else 0
    tables = F.pad(tables, (0, max(0, count * blocks - tables.shape[1])))
    chunks = []
    for number in range(count):
        seeing = ((first <= number) & (number <= last)).nonzero().squeeze(1)
        if len(seeing):
            part = tables[seeing, number * blocks : (number + 1) * blocks]
            chunks.append(_Chunk(number, seeing, part))
    return _Tiles(
        torch.tensor(rows, dtype=torch.int64, device=device).view(-1, QUERIES), at, chunks
    )


CHUNKS = AttentionKernel("chunks", _decline, attend_chunks)
