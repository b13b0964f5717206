"""The attention kernel; kernels/triton_ops/paged_attention.py says how it is used.

A program takes a tile of rows (the query heads of one kv head, for as many tokens of one sequence
as fit) over a range of keys, with a running softmax (Milakov and Gimelshein, arXiv:1805.02867).
Codes stay codes up to the matrix product: keys' scales multiply the logits, and values' scales go
into the running softmax as p' = exp2(s + log2(scale) - peak), which keeps p' within float16
whatever the scales are; p' / scale sums to the denominator. Groups of channels with a scale each
are dequantized before the product.
"""

from __future__ import annotations

from .attention_device import (
    LN2,
    LOG2E,
    cap_logits,
    load_codes,
    load_rows,
    sequence_of_tile,
    with_sink,
)
from .device_math import dot
from .kv_codes import FP8_FACTOR, SMALLEST_SCALE
from .shim import jit, tl


@jit
def attention_kernel(
    q_ptr, k_ptr, k_scale_ptr, k_offset_ptr, k_static_ptr, v_ptr, v_scale_ptr, v_offset_ptr,
    v_static_ptr, table_ptr, context_ptr, cu_ptr, sinks_ptr, slopes_ptr, out_ptr, lse_ptr,
    seqs, heads, splits, scale, softcap, window, q_token, q_head, k_block, k_head, k_slot,
    ks_block, ks_head, ks_slot, v_block, v_head, v_slot, vs_block, vs_head, vs_slot, table_seq,
    HEAD_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    ONE_TILE: tl.constexpr, K_BITS: tl.constexpr, K_FP8: tl.constexpr, K_SCALES: tl.constexpr,
    K_GROUP: tl.constexpr, K_OFFSETS: tl.constexpr, K_PAD: tl.constexpr, V_BITS: tl.constexpr,
    V_FP8: tl.constexpr, V_SCALES: tl.constexpr, V_GROUP: tl.constexpr, V_OFFSETS: tl.constexpr,
    V_PAD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, kv heads, splits. K_SCALES, V_SCALES: "none", "static" (one a kv head),
    "token" (one a key and head) or "group". K_PAD, V_PAD: powers of two that hold a row's entries.
    SPLIT: keys of a program, all where it is 0; then lse is natural, else that of a part, in log2.
    """
    dtype = q_ptr.dtype.element_ty
    BLOCK_Q: tl.constexpr = BLOCK_M // HEAD_GROUP
    K_PARTS: tl.constexpr = 1 + (K_BITS == 4)
    V_PARTS: tl.constexpr = 1 + (V_BITS == 4)
    K_WIDTH: tl.constexpr = HEAD_DIM // K_PARTS
    V_WIDTH: tl.constexpr = VALUE_DIM // V_PARTS
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tile if ONE_TILE else sequence_of_tile(cu_ptr, tile, seqs, BLOCK_Q)
    first = tl.load(cu_ptr + seq)
    tokens = tl.load(cu_ptr + seq + 1) - first
    local = (tile * 0) if ONE_TILE else (tile - first // BLOCK_Q - seq) * BLOCK_Q
    if local >= tokens:
        return
    context = tl.load(context_ptr + seq)
    kv_head = kv_head.to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * HEAD_GROUP + row % HEAD_GROUP
    token = local + row // HEAD_GROUP
    valid = (row < BLOCK_Q * HEAD_GROUP) & (token < tokens)
    position = context - tokens + token
    q_row = (first + token).to(tl.int64)
    q0, q1 = load_rows(q_ptr, q_row * q_token + head * q_head, valid, K_PARTS, K_WIDTH, K_PAD)

    k_factor = scale * (FP8_FACTOR if K_FP8 else 1.0)
    v_factor = FP8_FACTOR if V_FP8 else 1.0
    if K_SCALES == "static":
        k_factor *= tl.load(k_static_ptr + kv_head)
    if V_SCALES == "static":
        v_factor *= tl.load(v_static_ptr + kv_head)
    if K_OFFSETS and K_SCALES == "token":
        q_sum = tl.sum(q0.to(tl.float32), 1)
        if K_PARTS == 2:
            q_sum += tl.sum(q1.to(tl.float32), 1)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0) * LOG2E

    start = split * SPLIT
    end = tl.minimum(context, context - tokens + local + BLOCK_Q)  # no row sees more
    if SPLIT > 0:
        end = tl.minimum(end, start + SPLIT)
    if WINDOW:
        seen_from = tl.maximum(context - tokens + local - window + 1, 0)
        start = tl.maximum(start, seen_from // BLOCK_N * BLOCK_N)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    acc1 = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    for begin in range(start, end, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        inside = key < end
        block = tl.load(table_ptr + seq.to(tl.int64) * table_seq + key // BLOCK_SIZE, mask=inside,
                        other=0).to(tl.int64)  # fmt: skip
        slot = key % BLOCK_SIZE
        ks_at = block * ks_block + kv_head * ks_head + slot * ks_slot
        vs_at = block * vs_block + kv_head * vs_head + slot * vs_slot
        k0, k1 = load_codes(
            k_ptr, k_scale_ptr, k_offset_ptr, block * k_block + kv_head * k_head + slot * k_slot,
            ks_at, inside, dtype, K_BITS, K_FP8, K_SCALES, K_GROUP, K_OFFSETS, K_WIDTH, K_PAD, ASM,
        )  # fmt: skip
        s = dot(q0, tl.trans(k0), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if K_PARTS == 2:
            s = dot(q1, tl.trans(k1), s)
        if K_SCALES == "token":
            k_scale = tl.load(k_scale_ptr + ks_at, mask=inside, other=0.0).to(tl.float32)
            s *= (k_scale * k_factor)[None, :]
            if K_OFFSETS:
                k_offset = tl.load(k_offset_ptr + ks_at, mask=inside, other=0.0).to(tl.float32)
                s += q_sum[:, None] * (k_offset * scale)[None, :]
        else:
            s *= k_factor
        if SOFTCAP:
            s = cap_logits(s, softcap)
        s *= LOG2E
        if ALIBI:
            s += slope[:, None] * (key[None, :] - position[:, None])
        if V_SCALES == "token":
            v_scale = tl.load(v_scale_ptr + vs_at, mask=inside, other=1.0).to(tl.float32)
            v_scale = tl.maximum(v_scale, SMALLEST_SCALE)  # a slot that was never written has 0
            s += tl.log2(v_scale)[None, :]
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            visible &= position[:, None] - key[None, :] < window
        s = tl.where(visible, s, -float("inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(s - shift[:, None])
        fade = tl.exp2(peak - shift)
        peak = higher
        acc0 *= fade[:, None]
        if V_PARTS == 2:
            acc1 *= fade[:, None]
        weight = p
        if V_SCALES == "token":
            weight = p / v_scale[None, :]
        total = total * fade + tl.sum(weight, 1)
        if V_OFFSETS and V_SCALES == "token":
            v_offset = tl.load(v_offset_ptr + vs_at, mask=inside, other=0.0).to(tl.float32)
            lift = tl.sum(weight * v_offset[None, :], 1)[:, None]
            acc0 += lift
            if V_PARTS == 2:
                acc1 += lift
        v0, v1 = load_codes(
            v_ptr, v_scale_ptr, v_offset_ptr, block * v_block + kv_head * v_head + slot * v_slot,
            vs_at, inside, dtype, V_BITS, V_FP8, V_SCALES, V_GROUP, V_OFFSETS, V_WIDTH, V_PAD, ASM,
        )  # fmt: skip
        acc0 = dot(p.to(dtype), v0, acc0)
        if V_PARTS == 2:
            acc1 = dot(p.to(dtype), v1, acc1)

    empty = total == 0
    lse = tl.where(empty, -float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
    share = v_factor / tl.where(empty, 1.0, total)
    out_row = (q_row * heads + head) * splits + split
    if SPLIT == 0:
        if SINKS:
            lse, kept = with_sink(lse, sinks_ptr, head, valid)
            share *= kept
        tl.store(lse_ptr + out_row, lse * LN2, mask=valid)
    else:
        tl.store(lse_ptr + out_row, lse, mask=valid)
        valid &= ~empty
    channel = tl.arange(0, V_PAD)
    out_at = out_ptr + (out_row * VALUE_DIM)[:, None] + channel[None, :]
    out_mask = valid[:, None] & (channel < V_WIDTH)[None, :]
    tl.store(out_at, (acc0 * share[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
    if V_PARTS == 2:
        tl.store(
            out_at + V_WIDTH, (acc1 * share[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask
        )
