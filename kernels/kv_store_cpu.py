"""Store keys and values in dense blocks on a CPU, in few calls.

Queries and keys that lie beside each other, as one product gives them, are turned at once: with the
halves of a head exchanged and the sines' first half negative, a rotation is x * cos + x' * sin. The
cosines and sines of the step's tokens are gathered once for all layers, and so are the rows of the
pools, taken as one list of heads' entries. What is computed is the reference's, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_store_ops import NewTokens, StoreKernel, StoreOptions, StoreProblem
from .norm_ops import rms_norm_reference
from .paged_kv import BlockPool, places_of
from .rotary import Rotary, rotate_positions

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _decline(problem: StoreProblem) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    for name, form in (("keys", problem.keys), ("values", problem.values)):
        if form.fmt is not None:
            return f"stores {name} as they are, not as codes"
    if problem.dtype not in FLOATS:
        return f"takes 16 and 32-bit floats, not {str(problem.dtype).removeprefix('torch.')}"
    return None


def _store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: BlockPool,
    values: BlockPool,
    tokens: NewTokens,
    options: StoreOptions,
) -> Tensor:
    dtype, norm = q.dtype, options.norm
    if norm is not None:
        q = rms_norm_reference(q.float(), norm.q_weight, norm.eps).out
        k = rms_norm_reference(k.float(), norm.k_weight, norm.eps).out
    if options.rotary is not None:
        both = _turned(_side_by_side(q, k), options.rotary, tokens)
        q, k = both.to(dtype).split_with_sizes([q.shape[1], k.shape[1]], 1)
    for pool, x in ((keys, k), (values, v)):
        size, heads = pool.block_size, pool.kv_heads
        kept, rows = tokens.once(("rows", size, heads), lambda s=size, h=heads: _rows(tokens, s, h))
        x = x if kept is None else x[kept]
        codes, width = pool.codes, x.shape[-1]
        entries = x.reshape(-1, width)
        if codes.dtype != entries.dtype:
            entries = entries.to(codes.dtype)
        codes.view(-1, width).index_copy_(0, rows, entries)
    return q if q.dtype == dtype else q.to(dtype)


def _side_by_side(q: Tensor, k: Tensor) -> Tensor:
    """[tokens, heads of q and of k, head_dim], without a copy where they lie so."""
    heads = q.shape[1]
    behind = q.data_ptr() + heads * q.stride(1) * q.element_size()
    if k.data_ptr() == behind and k.stride() == q.stride() and k.dtype == q.dtype:
        return q.as_strided((q.shape[0], heads + k.shape[1], q.shape[2]), q.stride())
    return torch.cat([q, k], 1)


def _turned(x: Tensor, rotary: Rotary, tokens: NewTokens) -> Tensor:
    """x [tokens, heads, head_dim] at the tokens' positions, float32."""
    if rotary.interleaved or rotary.rotary_dim != x.shape[-1]:
        return rotate_positions(x.float(), rotary, tokens.positions)
    # tables are told apart by identity: the key keeps them alive
    cos, sin = tokens.once(("turn", rotary.cos), lambda: _turn_rows(rotary, tokens.positions))
    exchanged = x.roll(rotary.rotary_dim // 2, -1)
    return (x * cos).addcmul_(exchanged, sin)


def _turn_rows(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What `x` and what `x` with its halves exchanged is multiplied with, [tokens, 1, head_dim]."""
    cos, sin = (table[positions].unsqueeze(1) for table in rotary[:2])
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def _rows(tokens: NewTokens, size: int, heads: int) -> tuple[Tensor | None, Tensor]:
    """The tokens that are stored (None: all), and where their heads' entries go in a pool whose
    axes of blocks, heads and offsets are taken as one."""
    kept, block, offset = places_of(tokens.slots, size)
    head = torch.arange(heads) * size
    return kept, ((block * heads * size + offset)[:, None] + head).flatten()


TORCH_CPU = StoreKernel("torch_cpu", _decline, _store)
