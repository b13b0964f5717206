"""The paged attention op: queries of several sequences against keys and values in blocks.

The definition: a sequence's keys and values are read out of their blocks, and each of its newest
tokens attends to those before it and itself. New keys and values are in the blocks already
(kernels/kv_store_ops.py), so a token sees the same quantized keys however its prompt was cut into
chunks, and one op serves prefill, chunks of it, decode, and several tokens that are verified at
once. The logits of a row with position p and a key at j are

    s = scale * q k          s = softcap * tanh(s / softcap)          s = s + slope * (j - p)

each where asked for, over p - sliding_window < j <= p; sinks are logits of keys without a value
(Xiao et al. 2023, arXiv:2309.17453, as gpt-oss learns them), ALiBi's slopes are those of Press et
al. (arXiv:2108.12409).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import Choice, choose
from .kv_quant import rotate_heads
from .paged_kv import BlockPool, PoolForm, Step, gather_blocks


class AttentionOptions(NamedTuple):
    """scale: of the logits, as a rule head_dim^-0.5. sliding_window: keys that a token sees, itself
    included; None: all. softcap: None for none. sinks, alibi_slopes: float32 [heads].
    rotated_queries: q has been through the Hadamard matrix that keys are stored through; nothing
    where there is none. wants_lse: False lets a kernel leave `lse` undefined."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    rotated_queries: bool = False
    wants_lse: bool = True


@dataclass(frozen=True, eq=False)
class PagedBatch(Step):
    """The sequences of one step, the same for every layer.

    block_tables: int32 [seqs, max_blocks], the blocks of each in order. context_lens: int32 [seqs],
    keys of each, those of its new tokens included; 0 for a padded row. cu_seqlens_q: int32
    [seqs + 1], where the new tokens of each begin among all. max_query_len, max_context_len: at
    least the largest, known without asking the device. batch_invariant: a token's result must have
    the same bits in every batch.
    """

    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_query_len: int
    max_context_len: int
    batch_invariant: bool = field(default=False, kw_only=True)


class AttentionOutput(NamedTuple):
    """out: [tokens, heads, head_dim] in q's dtype. lse: float32 [tokens, heads], the natural
    logarithm of the sum of exp(logits), a sink's among them; -inf and an out of zero without any
    key."""

    out: Tensor
    lse: Tensor


class AttentionProblem(NamedTuple):
    """What decides which kernel can run; dtype, device: of the queries."""

    keys: PoolForm
    values: PoolForm
    heads: int
    dtype: torch.dtype
    device: str
    softcap: bool = False
    batch_invariant: bool = False

    def __str__(self) -> str:
        cap = ", softcap" if self.softcap else ""
        return f"{self.heads} heads over keys of {self.keys}, values of {self.values}{cap}"


@dataclass(frozen=True)
class AttentionKernel:
    """One implementation of paged attention. `decline(problem)`: None, or why it cannot run."""

    name: str
    decline: Callable[[AttentionProblem], str | None]
    run: Callable[[Tensor, BlockPool, BlockPool, PagedBatch, AttentionOptions], AttentionOutput]


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> AttentionOutput:
    """The definition, for one sequence: its newest n tokens q [n, heads, head_dim] against all its
    keys k [kv_heads, length, head_dim] and values v [kv_heads, length, value_dim].

    Computed in float64 where q is, in float32 otherwise. Head h reads kv head h // (heads //
    kv_heads).
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    n, heads = q.shape[:2]
    kv_heads, length = k.shape[:2]
    grouped = q.to(dtype).unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)
    logits = (grouped @ k.to(dtype).unsqueeze(1).mT).mul_(options.scale)  # [kv, group, n, length]
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    position = torch.arange(length - n, length, device=q.device)[:, None]
    distance = position - torch.arange(length, device=q.device)
    if options.alibi_slopes is not None:
        logits -= options.alibi_slopes.to(dtype).view(kv_heads, -1, 1, 1) * distance
    seen = distance >= 0
    if options.sliding_window is not None:
        seen &= distance < options.sliding_window
    logits = logits.masked_fill_(~seen, -torch.inf).flatten(0, 1)  # [heads, n, length]
    if options.sinks is not None:
        sinks = options.sinks.to(dtype).view(heads, 1, 1).expand(-1, n, -1)
        logits = torch.cat([logits, sinks], dim=2)
    lse = torch.logsumexp(logits, dim=2, keepdim=True)
    shift = torch.where(lse == -torch.inf, 0.0, lse)  # a padded row has no key at all
    weights = torch.exp(logits - shift)[..., :length].unflatten(0, (kv_heads, -1))
    out = (weights @ v.to(dtype).unsqueeze(1)).flatten(0, 1)
    return AttentionOutput(out.transpose(0, 1).to(q.dtype), lse.squeeze(2).T.float())


def paged_attention_reference(
    q: Tensor, keys: BlockPool, values: BlockPool, batch: PagedBatch, options: AttentionOptions
) -> AttentionOutput:
    """The definition, for q [tokens, heads, head_dim] of the sequences of `batch`; see `attend`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:2], values.head_dim)
    lse = torch.empty(q.shape[:2], device=q.device)
    if options.rotated_queries and keys.fmt is not None and keys.fmt.rotate:
        q = rotate_heads(q.to(dtype)).to(q.dtype)  # its own inverse
    starts = batch.cu_seqlens_q.tolist()
    for seq, length in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        blocks = batch.block_tables[seq : seq + 1, : -(-length // keys.block_size)]
        k, v = (gather_blocks(pool, blocks, dtype)[0, :, :length] for pool in (keys, values))
        out[rows], lse[rows] = attend(q[rows], k, v, options)
    return AttentionOutput(out, lse)


def attention_problem(
    q: Tensor, keys: BlockPool, values: BlockPool, batch: PagedBatch, options: AttentionOptions
) -> AttentionProblem:
    return AttentionProblem(
        keys.form,
        values.form,
        q.shape[1],
        q.dtype,
        q.device.type,
        options.softcap is not None,
        batch.batch_invariant,
    )


@functools.cache
def attention_kernels() -> tuple[AttentionKernel, ...]:
    """The dispatch table, best first. The last one accepts everything."""
    from .attention_chunks import CHUNKS
    from .attention_cpu import SDPA_CPU
    from .attention_triton import TRITON

    reference = AttentionKernel("reference", lambda problem: None, paged_attention_reference)
    return TRITON, SDPA_CPU, CHUNKS, reference


def choose_attention(
    problem: AttentionProblem, force: str | None = None
) -> Choice[AttentionKernel]:
    """The kernel that runs `problem`; UserError when the one named `force` cannot."""
    return choose("attention", attention_kernels(), problem, force)


@functools.lru_cache(maxsize=256)
def _chosen(problem: AttentionProblem, force: str | None) -> AttentionKernel:
    return choose_attention(problem, force).candidate


def paged_attention(
    q: Tensor,
    keys: BlockPool,
    values: BlockPool,
    batch: PagedBatch,
    options: AttentionOptions,
    force: str | None = None,
) -> AttentionOutput:
    """`paged_attention_reference` by the kernel that `choose_attention` takes."""
    kernel = _chosen(attention_problem(q, keys, values, batch, options), force)
    return kernel.run(q, keys, values, batch, options)
