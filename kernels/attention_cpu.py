"""Paged attention on a CPU: blocks gathered for many sequences at once, then torch's flash kernel.

torch has no CPU kernel that reads blocks, so keys and values are copied together first, which costs
less than half of what attending does. Sequences with as many new tokens and like lengths go
together, the shorter ones masked. The query heads that share a kv head are rows of one product,
which spares copies of keys and values for each of them; longer prompts take them apart, so that
the mask stays small. In bfloat16 oneDNN's batched products take less time than the flash kernel
from eight or so sequences on. They round logits to bfloat16, so a second product gives what the
rounding left out. Keys and values are gathered into memory that is kept. What follows
from the batch alone is made once and kept for all layers.

Measured (one thread of a Zen 4 core, 9 heads over 3 kv heads of 64, blocks of 16, bfloat16, best
runs): at 16 sequences of 128 keys 0.60 ms, one call a sequence 1.83 ms, SDPA's own grouped heads
15.7 ms, batched products without it 20 ms; at 16 of 2048, 47, 69, 335 and 261 ms. A row is computed
alike in every batch, but for last bits in which float32 products differ with threads and alignment.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_ops import (
    AttentionKernel,
    AttentionOptions,
    AttentionOutput,
    AttentionProblem,
    PagedBatch,
)
from .kv_quant import rotate_heads
from .paged_kv import BlockPool, block_rows, gather_blocks

MAX_ROWS = 256  # rows that share a kv head in one product
PRODUCT_PAIRS = 24  # sequences times kv heads, from which products are faster
KEYS_AT_ONCE = 1 << 20  # values: 2 MiB
PADDING = 2  # no sequence is gathered together with one more than so many times as long


class _Group(NamedTuple):
    """Sequences that are attended to at once, of as many new tokens each.

    rows: int64 [seqs * n], their tokens in q; None where they are all of q, in order. tables:
    [seqs, blocks]; blocks: their `block_rows`, [2, seqs, kv_heads * blocks], of keys and, in the
    keys' pair, of values. bias: added to the logits, [seqs, 1 or heads, n, keys], or with `folded`,
    [seqs, 1 or kv_heads, shared * n, keys]; None where a sequence has no keys but those of its new
    tokens, whose mask is a triangle.
    """

    rows: Tensor | None
    tables: Tensor
    blocks: Tensor
    bias: Tensor | None
    folded: bool


def _decline(problem: AttentionProblem) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    if problem.batch_invariant:
        return "its sums depend on the batch"
    if problem.softcap:
        return "has no softcap"
    if problem.keys.head_dim != problem.values.head_dim:
        return (
            f"takes keys and values of one head size, not {problem.keys.head_dim} and "
            f"{problem.values.head_dim}"
        )
    if problem.dtype == torch.float64:
        return "takes 16 and 32-bit floats, not float64"
    return None


def attend_gathered(
    q: Tensor,
    keys: BlockPool,
    values: BlockPool | None,
    batch: PagedBatch,
    options: AttentionOptions,
) -> AttentionOutput:
    """`paged_attention_reference`; the values are the keys where `values` is None."""
    if keys.fmt is not None and keys.fmt.rotate and options.rotated_queries:
        q = rotate_heads(q.float()).to(q.dtype)  # gathered keys are turned back
    shared = q.shape[1] // keys.kv_heads
    # slopes are told apart by identity: the key keeps them alive
    form = (q.dtype, shared, keys.codes.shape)
    key = ("sdpa_cpu", options.sliding_window, options.alibi_slopes, form)
    groups = batch.once(key, lambda: _plan(batch, keys, options, q.dtype, shared))
    if len(groups) == 1 and groups[0].rows is None:
        return _attend(q, keys, values, groups[0], options)
    out, lse = q.new_zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    if options.sinks is not None:
        lse = options.sinks.expand(q.shape[:2]).clone()
    for group in groups:
        rows = group.rows
        part = _attend(q if rows is None else q[rows], keys, values, group, options)
        place = slice(None) if rows is None else rows
        out[place] = part.out
        if options.wants_lse:
            lse[place] = part.lse
    return AttentionOutput(out, lse)


def _attend(
    q: Tensor, keys: BlockPool, values: BlockPool | None, group: _Group, options: AttentionOptions
) -> AttentionOutput:
    """Of the tokens of one group, q [seqs * n, heads, head_dim]."""
    heads, head_dim = q.shape[1:]
    seqs = group.tables.shape[0]  # len() of a tensor is a call of Python's
    n = q.shape[0] // seqs
    if n == 1 and group.folded:
        q = q.view(seqs, keys.kv_heads, -1, head_dim)
    else:
        q = q.view(seqs, n, heads, head_dim).transpose(1, 2)
        if group.folded:
            q = q.reshape(seqs, keys.kv_heads, -1, head_dim)
    if _takes_products(q, group):
        wants_lse = options.wants_lse or options.sinks is not None
        out, lse = _by_products(q, keys, values, group, options.scale, wants_lse)
    else:
        out, lse = _by_flash(q, keys, values, group, options.scale)
    if n == 1:
        out = out.reshape(seqs, heads, head_dim)
    else:
        out = out.reshape(seqs, heads, n, head_dim).transpose(1, 2).flatten(0, 1)
    if not options.wants_lse and options.sinks is None:
        return AttentionOutput(out, lse)  # of no meaning
    lse = lse.reshape(seqs, heads, n).transpose(1, 2).flatten(0, 1)
    if options.sinks is not None:
        whole = torch.logaddexp(lse, options.sinks)
        out, lse = out * torch.exp(lse - whole).unsqueeze(-1).to(out.dtype), whole
    return AttentionOutput(out, lse)


def _by_flash(
    q: Tensor, keys: BlockPool, values: BlockPool | None, group: _Group, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _both(keys, values, group.tables, q.dtype, group.blocks)
    if not group.folded:
        k, v = (x.repeat_interleave(q.shape[1] // keys.kv_heads, 1) for x in (k, v))
    if group.bias is None:
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, group.bias is None, attn_mask=group.bias, scale=scale
    )


def _takes_products(q: Tensor, group: _Group) -> bool:
    """Whether a group's q [seqs, kv_heads, rows, head_dim] goes by products."""
    pairs = q.shape[0] * q.shape[1]
    few = q.shape[2] <= q.shape[3]  # more would make the logits larger than the keys
    return group.folded and few and q.dtype == torch.bfloat16 and pairs >= PRODUCT_PAIRS and (
        _has_bfloat16_products()
    )  # fmt: skip


@functools.cache
def _has_bfloat16_products() -> bool:
    return torch.cpu._is_avx512_bf16_supported() and torch.backends.mkldnn.is_available()


def _by_products(
    q: Tensor, keys: BlockPool, values: BlockPool | None, group: _Group, scale: float,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out as q [seqs, kv_heads, rows, head_dim], lse float32 [seqs, kv_heads, rows], of no meaning
    where it is not wanted."""
    assert group.bias is not None
    seqs, kv_heads, rows, head_dim = q.shape
    length = group.tables.shape[1] * keys.block_size
    parts = -(-seqs * kv_heads * length * head_dim // KEYS_AT_ONCE)
    step = -(-seqs // min(parts, seqs))
    outs, lses = [], []
    for i in range(0, seqs, step):
        part = slice(i, i + step)
        k, v = _both(keys, values, group.tables[part], q.dtype, group.blocks[:, part])
        k, v, queries = (x.flatten(0, 1) for x in (k, v, q[part]))
        near = torch.bmm(queries, k.mT)
        rest = torch.baddbmm(near, queries, k.mT, beta=-1)
        logits = near.float().add_(rest).view(-1, kv_heads, rows, length)
        logits = torch.add(group.bias[part], logits, alpha=scale)
        weights = logits.softmax(-1)
        outs.append(torch.bmm(weights.to(q.dtype).flatten(0, 1), v))
        # the largest weight is 1 over the sum of exp(logits - the largest)
        if wants_lse:
            lses.append(logits.amax(-1).sub_(weights.amax(-1).log_()))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    lse = torch.cat(lses) if lses else logits.new_empty(q.shape[:3])
    return out.view(q.shape), lse


def _both(
    keys: BlockPool, values: BlockPool | None, tables: Tensor, dtype: torch.dtype, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """What the blocks of `tables` [seqs, n] hold of keys and of values, each [seqs, kv_heads, n *
    block_size, head_dim]; the values are the keys where `values` is None. rows: of a `_Group`."""
    if keys.pair is not None and values is not None:
        k, v = _gathered(keys.pair, 2 * tables.shape[0], dtype, rows.reshape(-1), 0).chunk(2)
        return k, v
    own = rows[0].reshape(-1)
    k = v = _of_pool(keys, tables, dtype, own, 0)
    if values is not None:
        v = _of_pool(values, tables, dtype, own, 1)
    return k, v


def _of_pool(
    pool: BlockPool, tables: Tensor, dtype: torch.dtype, rows: Tensor, which: int
) -> Tensor:
    if pool.fmt is not None:
        return gather_blocks(pool, tables, dtype, rows)
    return _gathered(pool.codes, tables.shape[0], dtype, rows, which)


class _Kept(threading.local):
    """A thread's memory for gathered keys and values, by which of them and dtype."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, torch.dtype], Tensor] = {}


_kept = _Kept()


def _gathered(codes: Tensor, seqs: int, dtype: torch.dtype, rows: Tensor, which: int) -> Tensor:
    """Heads' blocks `rows` of codes [blocks, heads, size, dim]: [seqs, heads, n, dim] in `dtype`,
    in memory number `which` that the thread keeps for it, if they fit: new pages from the system
    would take longer than the products."""
    _, heads, size, dim = codes.shape
    source, count = codes.view(-1, size * dim), rows.shape[0] * size * dim
    if count > 2 * KEYS_AT_ONCE or codes.dtype != dtype:
        return source.index_select(0, rows).view(seqs, heads, -1, dim).to(dtype)
    kept = _kept.parts.get((which, dtype))
    if kept is None:
        with torch.inference_mode(False):
            kept = _kept.parts[which, dtype] = torch.empty(2 * KEYS_AT_ONCE, dtype=dtype)
    out = kept[:count].view(-1, size * dim)
    torch.index_select(source, 0, rows, out=out)
    return out.view(seqs, heads, -1, dim)


class _Member(NamedTuple):
    """A sequence: what must be equal in a group, and the blocks of it that are seen."""

    queries: int
    is_triangle: bool
    blocks: int
    first_block: int
    seq: int


def _plan(
    batch: PagedBatch, keys: BlockPool, options: AttentionOptions, dtype: torch.dtype, shared: int
) -> list[_Group]:
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
    members = []
    for seq, length in enumerate(lengths):
        n = starts[seq + 1] - starts[seq]
        if n == 0 or length == 0:
            continue
        seen_from = 0
        if options.sliding_window is not None:
            seen_from = max(0, length - n - options.sliding_window + 1)
        plain = options.alibi_slopes is None and (options.sliding_window or n) >= n
        first = seen_from // keys.block_size
        count = -(-length // keys.block_size) - first
        members.append(_Member(n, plain and 1 < n == length, count, first, seq))
    together: list[list[_Member]] = []
    for member in sorted(members, key=lambda m: (m[:2], -m.blocks)):
        longest = together[-1][0] if together else None
        if longest and longest[:2] == member[:2] and longest.blocks <= PADDING * member.blocks:
            together[-1].append(member)
        else:
            together.append([member])
    alone = len(together) == 1 and len(together[0]) == len(lengths)
    return [_group(group, batch, keys, options, dtype, shared, alone) for group in together]


def _group(
    members: list[_Member], batch: PagedBatch, keys: BlockPool, options: AttentionOptions,
    dtype: torch.dtype, shared: int, alone: bool,
) -> _Group:  # fmt: skip
    """alone: the group is the whole batch, so its order need not change."""
    if alone:
        members = sorted(members, key=lambda m: m.seq)
    n, count = members[0].queries, max(m.blocks for m in members)
    seqs = torch.tensor([m.seq for m in members])
    first = torch.tensor([m.first_block for m in members])[:, None]
    index = (first + torch.arange(count)).clamp_(max=batch.block_tables.shape[1] - 1)
    tables = batch.block_tables[seqs].gather(1, index)
    rows = None
    if not alone:
        rows = (batch.cu_seqlens_q[seqs].long()[:, None] + torch.arange(n)).flatten()
    bias = None
    folded = not members[0].is_triangle and n * shared <= MAX_ROWS
    if not members[0].is_triangle:
        position = batch.context_lens[seqs].long()[:, None] - n + torch.arange(n)
        key = first * keys.block_size + torch.arange(count * keys.block_size)
        bias = _bias(position[:, :, None] - key[:, None, :], options, dtype)
        if folded:
            split = (-1, shared) if bias.shape[1] > 1 else (1, 1)
            bias = bias.unflatten(1, split).expand(-1, -1, shared, -1, -1).flatten(2, 3)
    own = block_rows(tables, keys.kv_heads).view(len(members), -1)
    behind = keys.codes.shape[0] * keys.kv_heads
    return _Group(rows, tables, torch.stack([own, own + behind]), bias, folded)


def _bias(distance: Tensor, options: AttentionOptions, dtype: torch.dtype) -> Tensor:
    """[seqs, 1 or heads, n, keys] from how far behind a token each key lies, [seqs, n, keys]."""
    seen = distance >= 0
    if options.sliding_window is not None:
        seen &= distance < options.sliding_window
    if options.alibi_slopes is None:
        bias = torch.zeros(seen.shape, dtype=dtype)[:, None]
    else:
        bias = (-options.alibi_slopes[:, None, None] * distance[:, None]).to(dtype)
    return bias.masked_fill_(~seen[:, None], -torch.inf)


SDPA_CPU = AttentionKernel("sdpa_cpu", _decline, attend_gathered)
