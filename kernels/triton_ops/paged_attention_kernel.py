# pyright: reportAssignmentType=false
"""The attention kernel; kernels/triton_ops/paged_attention.py says how it is used.

A program takes a tile of rows (the query heads of one kv head, for as many tokens of one sequence
as fit) over a range of keys, with a running softmax (Milakov and Gimelshein, arXiv:1805.02867).
Codes stay codes up to the matrix product: keys' scales multiply the logits, and values' scales go
into the running softmax as p' = exp2(s + log2(scale) - peak), which keeps p' within float16
whatever the scales are; p' / scale sums to the denominator. Groups of channels with a scale each
are dequantized before the product.

Unquantized keys and values are copied to shared memory ahead of their use by Triton's pipeline.
It would copy codes there too, as few bytes at a time as the product reads them; so the kernel
itself loads the next tile of codes, 16 bytes at a time, while it works on one (HOLD), in decode,
which waits for memory; tiles of prefill come from the L2 cache, and its registers are few.
"""

from __future__ import annotations

from .attention_device import (
    LN2,
    LOG2E,
    fit_rows,
    load_rows,
    load_tile,
    logits,
    sequence_of_tile,
    unpack_tile,
    with_sink,
)
from .device_math import dot
from .kv_codes import SMALLEST_SCALE, fp8_factor
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
    K_GROUP: tl.constexpr, K_OFFSETS: tl.constexpr, K_PAD: tl.constexpr, K_UNIT: tl.constexpr,
    V_BITS: tl.constexpr, V_FP8: tl.constexpr, V_SCALES: tl.constexpr, V_GROUP: tl.constexpr,
    V_OFFSETS: tl.constexpr, V_PAD: tl.constexpr, V_UNIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, kv heads, splits. K_SCALES, V_SCALES: "none", "static" (one a kv head),
    "token" (one a key and head) or "group". K_PAD, V_PAD: powers of two that hold a row's entries.
    K_UNIT, V_UNIT: what steps of codes are counted in: it divides them, as the compiler must know.
    SPLIT: keys of a program, all where it is 0; then lse is natural, else that of a part, in log2.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    HALF: tl.constexpr = tl.float16 if dtype == tl.bfloat16 else dtype
    K_DTYPE: tl.constexpr = dtype if K_BITS == 16 or K_SCALES == "group" else HALF
    V_DTYPE: tl.constexpr = dtype if V_BITS == 16 or V_SCALES == "group" else HALF
    HOLD: tl.constexpr = SPLIT > 0 and (K_BITS < 16 or V_BITS < 16)
    BLOCK_Q: tl.constexpr = BLOCK_M // HEAD_GROUP
    K_PARTS: tl.constexpr = 1 + (K_BITS == 4)
    V_PARTS: tl.constexpr = 1 + (V_BITS == 4)
    K_WIDTH: tl.constexpr = HEAD_DIM // K_PARTS
    V_WIDTH: tl.constexpr = VALUE_DIM // V_PARTS
    K_ROW: tl.constexpr = K_WIDTH if K_BITS == 16 else K_WIDTH // 4  # floats, or words of codes
    V_ROW: tl.constexpr = V_WIDTH if V_BITS == 16 else V_WIDTH // 4
    K_ROW_PAD: tl.constexpr = K_PAD if K_BITS == 16 else K_PAD // 4
    V_ROW_PAD: tl.constexpr = V_PAD if V_BITS == 16 else V_PAD // 4
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
    q_sum = tl.sum(q0.to(tl.float32), 1)
    if K_PARTS == 2:
        q_sum += tl.sum(q1.to(tl.float32), 1)
    q0, q1, q_unit = fit_rows(q0, q1, K_PARTS, K_DTYPE)

    k_factor = scale * (fp8_factor(ASM, K_DTYPE) if K_FP8 else 1.0)
    v_factor = fp8_factor(ASM, V_DTYPE) if V_FP8 else 1.0
    if K_SCALES == "static":
        k_factor *= tl.load(k_static_ptr + kv_head)
    if V_SCALES == "static":
        v_factor *= tl.load(v_static_ptr + kv_head)
    BASE: tl.constexpr = 1.0 if SOFTCAP else LOG2E  # logits are in log2, from the start or capped
    q_unit *= k_factor * BASE
    q_sum *= scale * BASE
    slope = q_unit
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0) * LOG2E

    start = split * SPLIT
    end = tl.minimum(context, context - tokens + local + BLOCK_Q)  # no row sees more
    if SPLIT > 0:
        end = tl.minimum(end, start + SPLIT)
    if WINDOW:
        seen_from = tl.maximum(context - tokens + local - window + 1, 0)
        start = tl.maximum(start, seen_from // BLOCK_N * BLOCK_N)
    table_ptr += seq.to(tl.int64) * table_seq
    k_pool = (k_ptr + kv_head * k_head * K_UNIT, k_scale_ptr, k_offset_ptr, kv_head * ks_head,
              k_block, k_slot, ks_block, ks_slot)  # fmt: skip
    v_pool = (v_ptr + kv_head * v_head * V_UNIT, v_scale_ptr, v_offset_ptr, kv_head * vs_head,
              v_block, v_slot, vs_block, vs_slot)  # fmt: skip
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    acc1 = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    if HOLD:
        key = start + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
        k_next, ks_next, ko_next = load_tile(k_pool, block, key, key < end, K_UNIT, BLOCK_SIZE,
                                             K_SCALES, K_OFFSETS, K_ROW, K_ROW_PAD)  # fmt: skip
        v_next, vs_next, vo_next = load_tile(v_pool, block, key, key < end, V_UNIT, BLOCK_SIZE,
                                             V_SCALES, V_OFFSETS, V_ROW, V_ROW_PAD)  # fmt: skip
        key += BLOCK_N
        block_next = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
    for begin in range(start, end, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        if HOLD:
            k, k_scale, k_offset, v, v_scale, v_offset, here = (
                k_next, ks_next, ko_next, v_next, vs_next, vo_next, block,
            )  # fmt: skip
            block, ahead = block_next, key + BLOCK_N
        else:
            block, ahead = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0), key
        k_next, ks_next, ko_next = load_tile(k_pool, block, ahead, ahead < end, K_UNIT, BLOCK_SIZE,
                                             K_SCALES, K_OFFSETS, K_ROW, K_ROW_PAD)  # fmt: skip
        v_next, vs_next, vo_next = load_tile(v_pool, block, ahead, ahead < end, V_UNIT, BLOCK_SIZE,
                                             V_SCALES, V_OFFSETS, V_ROW, V_ROW_PAD)  # fmt: skip
        if HOLD:
            ahead += BLOCK_N
            block_next = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        else:
            k, k_scale, k_offset, v, v_scale, v_offset, here = (
                k_next, ks_next, ko_next, v_next, vs_next, vo_next, block,
            )  # fmt: skip
        k0, k1 = unpack_tile(k, k_pool, here, key, key < end, K_DTYPE, BLOCK_SIZE, K_BITS, K_FP8,
                             K_SCALES, K_GROUP, K_OFFSETS, K_WIDTH, K_PAD, ASM)  # fmt: skip
        if V_SCALES == "token":
            v_scale = tl.maximum(v_scale.to(tl.float32), SMALLEST_SCALE)  # never written: 0
        s = logits(
            q0, q1, q_unit, q_sum, k0, k1, k_scale, k_offset, v_scale, key, position, slope,
            softcap, window, K_PARTS, K_SCALES, K_OFFSETS, V_SCALES, WINDOW, SOFTCAP, ALIBI,
        )  # fmt: skip
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
            weight = p * (1.0 / v_scale)[None, :]
        total = total * fade + tl.sum(weight, 1)
        if V_OFFSETS and V_SCALES == "token":
            lift = tl.sum(weight * v_offset.to(tl.float32)[None, :], 1)[:, None]
            acc0 += lift
            if V_PARTS == 2:
                acc1 += lift
        v0, v1 = unpack_tile(v, v_pool, here, key, key < end, V_DTYPE, BLOCK_SIZE, V_BITS, V_FP8,
                             V_SCALES, V_GROUP, V_OFFSETS, V_WIDTH, V_PAD, ASM)  # fmt: skip
        acc0 = dot(p.to(V_DTYPE), v0, acc0)
        if V_PARTS == 2:
            acc1 = dot(p.to(V_DTYPE), v1, acc1)

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
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    channel = tl.arange(0, V_PAD)
    out_at = out_ptr + (out_row * VALUE_DIM)[:, None] + channel[None, :]
    out_mask = valid[:, None] & (channel < V_WIDTH)[None, :]
    tl.store(out_at, (acc0 * share[:, None]).to(OUT), mask=out_mask)
    if V_PARTS == 2:
        tl.store(out_at + V_WIDTH, (acc1 * share[:, None]).to(OUT), mask=out_mask)
