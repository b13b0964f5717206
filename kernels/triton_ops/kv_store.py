# pyright: reportAssignmentType=false
"""Turn queries and keys and store keys and values, in one pass; kernels/kv_store_ops.py says what.

A program takes some tokens of one head, of queries, keys or values by its place in the grid. Each
channel is computed where it is needed, from itself and its partner in the rotary embedding, so that
a 4-bit head comes as its two halves and is packed without moving anything between threads; only a
Hadamard matrix needs the whole head in one tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kv_store_ops import NewTokens, StoreOptions
from ..paged_kv import BlockPool
from .checks import check_tensor
from .kv_store_device import load_head, store_head
from .launch import Warps, launch
from .paged_attention import check_pool, pool_args, pool_constants
from .shim import jit, tl
from .tiles import padded

OP = "kv_store"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK_T = 8


@jit
def kv_store_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, position_ptr, slot_ptr, cos_ptr, sin_ptr, q_weight_ptr,
    k_weight_ptr, kc_ptr, k_scale_ptr, k_offset_ptr, k_static_ptr, vc_ptr, v_scale_ptr,
    v_offset_ptr, v_static_ptr, tokens, heads, kv_heads, eps, q_token, q_head, k_token, k_head,
    v_token, v_head, kc_block, kc_head, kc_slot, ks_block, ks_head, ks_slot, vc_block, vc_head,
    vc_slot, vs_block, vs_head, vs_slot,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, Q_PAD: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, Q_ROTATION: tl.constexpr, K_BITS: tl.constexpr, K_FP8: tl.constexpr,
    K_SCALES: tl.constexpr, K_GROUP: tl.constexpr, K_OFFSETS: tl.constexpr, K_CLIP: tl.constexpr,
    K_ROTATION: tl.constexpr, K_PAD: tl.constexpr, V_BITS: tl.constexpr, V_FP8: tl.constexpr,
    V_SCALES: tl.constexpr, V_GROUP: tl.constexpr, V_OFFSETS: tl.constexpr, V_CLIP: tl.constexpr,
    V_ROTATION: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """Grid: TOKENS tokens; heads of queries, of keys, of values. The pads are those of a part."""
    K_PARTS: tl.constexpr = 1 + (K_BITS == 4)
    V_PARTS: tl.constexpr = 1 + (V_BITS == 4)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    valid = token < tokens
    head = tl.program_id(1).to(tl.int64)
    row = token.to(tl.int64)
    position = tl.load(position_ptr + token, mask=valid, other=0)
    slot = tl.load(slot_ptr + token, mask=valid, other=-1).to(tl.int64)
    stored = slot >= 0
    block, slot = tl.where(stored, slot // BLOCK_SIZE, 0), tl.where(stored, slot % BLOCK_SIZE, 0)
    if head < heads:
        x, _ = load_head(q_ptr, row * q_token + head * q_head, valid, q_weight_ptr, cos_ptr,
                         sin_ptr, position, eps, HEAD_DIM, 1, Q_PAD, ROTARY, INTERLEAVED, NORM,
                         Q_ROTATION, TOKENS)  # fmt: skip
        channel = tl.arange(0, Q_PAD)
        out_at = ((row * heads + head) * HEAD_DIM)[:, None] + channel[None, :]
        mask = valid[:, None] & (channel < HEAD_DIM)[None, :]
        tl.store(out_ptr + out_at, x.to(out_ptr.dtype.element_ty), mask=mask)
    elif head < heads + kv_heads:
        head -= heads
        x0, x1 = load_head(k_ptr, row * k_token + head * k_head, valid, k_weight_ptr, cos_ptr,
                           sin_ptr, position, eps, HEAD_DIM, K_PARTS, K_PAD, ROTARY, INTERLEAVED,
                           NORM, K_ROTATION, TOKENS)  # fmt: skip
        store_head(x0, x1, stored, kc_ptr, k_scale_ptr, k_offset_ptr, k_static_ptr,
                   block * kc_block + head * kc_head + slot * kc_slot,
                   block * ks_block + head * ks_head + slot * ks_slot, head, K_BITS, K_FP8,
                   K_SCALES, K_GROUP, K_OFFSETS, K_CLIP, HEAD_DIM // K_PARTS, K_PAD,
                   TOKENS)  # fmt: skip
    else:
        head -= heads + kv_heads
        y0, y1 = load_head(v_ptr, row * v_token + head * v_head, valid, v_ptr, v_ptr, v_ptr,
                           position, eps, VALUE_DIM, V_PARTS, V_PAD, 0, False, False, V_ROTATION,
                           TOKENS)  # fmt: skip
        store_head(y0, y1, stored, vc_ptr, v_scale_ptr, v_offset_ptr, v_static_ptr,
                   block * vc_block + head * vc_head + slot * vc_slot,
                   block * vs_block + head * vs_head + slot * vs_slot, head, V_BITS, V_FP8,
                   V_SCALES, V_GROUP, V_OFFSETS, V_CLIP, VALUE_DIM // V_PARTS, V_PAD,
                   TOKENS)  # fmt: skip


def kv_store(
    q: Tensor, k: Tensor, v: Tensor, keys: BlockPool, values: BlockPool, tokens: NewTokens,
    options: StoreOptions,
) -> Tensor:  # fmt: skip
    """`kv_store_reference` of q, k, v float16, bfloat16 or float32, any strides but those of their
    last axes. ValueError, naming it, for a tensor that does not fit."""
    check_store(q, k, v, keys, values, tokens, options)
    n, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rotary, norm = options.rotary, options.norm
    args = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "out_ptr": out,
        "position_ptr": tokens.positions,
        "slot_ptr": tokens.slots,
        "cos_ptr": rotary and rotary.cos,
        "sin_ptr": rotary and rotary.sin,
        "q_weight_ptr": norm and norm.q_weight,
        "k_weight_ptr": norm and norm.k_weight,
        **pool_args("k", keys, "kc", keys.codes),
        **pool_args("v", values, "vc", values.codes),
        "tokens": n,
        "heads": heads,
        "kv_heads": kv_heads,
        "eps": norm.eps if norm else 0.0,
        **{f"{s}_token": x.stride(0) for s, x in zip("qkv", (q, k, v), strict=True)},
        **{f"{s}_head": x.stride(1) for s, x in zip("qkv", (q, k, v), strict=True)},
    }
    turns = options.rotate_queries and keys.fmt is not None and keys.fmt.rotate
    constants = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": values.head_dim,
        "BLOCK_SIZE": keys.block_size,
        "TOKENS": BLOCK_T,
        "Q_PAD": padded(head_dim),
        "ROTARY": rotary.rotary_dim if rotary else 0,
        "INTERLEAVED": rotary is not None and rotary.interleaved,
        "NORM": norm is not None,
        "Q_ROTATION": head_dim & -head_dim if turns else 1,
        **_pool_constants("K", keys),
        **_pool_constants("V", values),
    }
    grid = (-(-n // BLOCK_T), heads + 2 * kv_heads)
    launch(kv_store_kernel, grid, args, constants, Warps(4, 1))
    return out


def _pool_constants(side: str, pool: BlockPool) -> dict[str, Any]:
    fmt, head_dim = pool.fmt, pool.head_dim
    return {
        **pool_constants(side, pool, 1),
        f"{side}_CLIP": 1.0 if fmt is None else fmt.clip,
        f"{side}_ROTATION": head_dim & -head_dim if fmt is not None and fmt.rotate else 1,
    }


def check_store(
    q: Tensor, k: Tensor, v: Tensor, keys: BlockPool, values: BlockPool, tokens: NewTokens,
    options: StoreOptions,
) -> None:  # fmt: skip
    """ValueError, naming what does not fit."""
    n, device, head_dim = len(q), q.device, keys.head_dim
    check_tensor(OP, "q", q, (None, None, head_dim), DTYPES)
    check_tensor(OP, "k", k, (n, keys.kv_heads, head_dim), [q.dtype], device)
    check_tensor(OP, "v", v, (n, values.kv_heads, values.head_dim), [q.dtype], device)
    for name, pool in (("keys", keys), ("values", values)):
        check_pool(OP, name, pool, q.dtype, device)
    if keys.codes.shape[:3] != values.codes.shape[:3]:
        raise ValueError(f"{OP}: keys and values have blocks of different shapes")
    check_tensor(OP, "slots", tokens.slots, (n,), [torch.int64], device, True)
    check_tensor(OP, "positions", tokens.positions, (n,), [torch.int64], device, True)
    if options.rotary is not None:
        size = options.rotary.rotary_dim
        if size > head_dim:
            raise ValueError(f"{OP}: the rotary table turns {size} channels, heads have {head_dim}")
        shape = options.rotary.cos.shape
        for name, table in (("cos", options.rotary.cos), ("sin", options.rotary.sin)):
            check_tensor(OP, name, table, shape, [torch.float32], device, True)
    if options.norm is not None:
        for name in ("q_weight", "k_weight"):
            weight = getattr(options.norm, name)
            check_tensor(OP, name, weight, (head_dim,), DTYPES, device, True)
