"""Store keys and values in dense blocks on a CPU, in few calls.

Queries and keys that lie beside each other, as one product gives them, are turned at once: with the
halves of a head exchanged and the sines' first half negative, a rotation is x * cos + x' * sin. The
cosines and sines of the step's tokens are gathered once for all layers, and so are the rows of the
pools, taken as one list of heads' entries. Where keys and values share a memory and nothing but
a rotation stands between, one write stores both. What is computed is the reference's, in float32.
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
    if keys.pair is not None and (turned := _all_turned(q, k, v, tokens, options)) is not None:
        kept, rows = tokens.once(("pair", keys.codes.shape), lambda: _pair_rows(tokens, keys))
        q, entries = turned.split_with_sizes([q.shape[1], turned.shape[1] - q.shape[1]], 1)
        _write(keys.pair, entries if kept is None else entries[kept], rows)
        return q
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
        _write(pool.codes, x if kept is None else x[kept], rows.flatten())
    return q if q.dtype == dtype else q.to(dtype)


def _write(codes: Tensor, x: Tensor, rows: Tensor) -> None:
    """x [tokens, heads, head_dim] as the entries `rows` of codes."""
    width = codes.shape[-1]
    entries = x.reshape(-1, width)
    if codes.dtype != entries.dtype:
        entries = entries.to(codes.dtype)
    codes.view(-1, width).index_copy_(0, rows, entries)


def _all_turned(
    q: Tensor, k: Tensor, v: Tensor, tokens: NewTokens, options: StoreOptions
) -> Tensor | None:
    """Queries and keys turned, and the values beside them, [tokens, heads of all, head_dim], where
    one product has given them all and nothing but a rotation of whole heads is wanted: values are
    turned by nothing, so that one op does it."""
    rotary = options.rotary
    if rotary is None or options.norm is not None or not _turns_heads(rotary, q):
        return None
    if not (_is_behind(k, q) and _is_behind(v, k)):
        return None
    count = q.shape[1] + k.shape[1] + v.shape[1]
    x = q.as_strided((q.shape[0], count, q.shape[2]), q.stride())
    # tables are told apart by identity: the key keeps them alive
    cos, sin = tokens.once(
        ("turn all", rotary.cos, v.shape[1]),
        lambda: _with_values(_turn_rows(rotary, tokens.positions), count, v.shape[1]),
    )
    turned = (x * cos).addcmul_(x.roll(rotary.rotary_dim // 2, -1), sin)
    return turned if turned.dtype == q.dtype else turned.to(q.dtype)


def _with_values(turn: tuple[Tensor, Tensor], count: int, values: int) -> tuple[Tensor, Tensor]:
    """`_turn_rows` for each of `count` heads, of which the last `values` are not turned."""
    cos, sin = (rows.repeat(1, count, 1) for rows in turn)
    cos[:, count - values :], sin[:, count - values :] = 1, 0
    return cos, sin


def _is_behind(x: Tensor, other: Tensor) -> bool:
    """Whether the heads of x lie behind those of `other`, token by token."""
    behind = other.data_ptr() + other.shape[1] * other.stride(1) * other.element_size()
    return x.data_ptr() == behind and x.stride() == other.stride() and x.dtype == other.dtype


def _side_by_side(q: Tensor, k: Tensor) -> Tensor:
    """[tokens, heads of q and of k, head_dim], without a copy where they lie so."""
    if _is_behind(k, q):
        return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())
    return torch.cat([q, k], 1)


def _turns_heads(rotary: Rotary, x: Tensor) -> bool:
    """Whether halves of whole heads are turned against each other."""
    return not rotary.interleaved and rotary.rotary_dim == x.shape[-1]


def _turned(x: Tensor, rotary: Rotary, tokens: NewTokens) -> Tensor:
    """x [tokens, heads, head_dim] at the tokens' positions, float32."""
    if not _turns_heads(rotary, x):
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
    """The tokens that are stored (None: all), and where their heads' entries go, [tokens, heads],
    in a pool whose axes of blocks, heads and offsets are taken as one."""
    kept, block, offset = places_of(tokens.slots, size)
    head = torch.arange(heads) * size
    return kept, (block * heads * size + offset)[:, None] + head


def _pair_rows(tokens: NewTokens, keys: BlockPool) -> tuple[Tensor | None, Tensor]:
    """`_rows` of a pool of keys and of that of the values behind it, a token's keys first."""
    kept, rows = _rows(tokens, keys.block_size, keys.kv_heads)
    behind = keys.codes.numel() // keys.codes.shape[-1]
    return kept, torch.stack([rows, rows + behind], 1).flatten()


TORCH_CPU = StoreKernel("torch_cpu", _decline, _store)
