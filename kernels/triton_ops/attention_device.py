# pyright: reportAssignmentType=false
"""Device functions of attention over blocks: which sequence, which keys, in what form they come."""

from __future__ import annotations

from .device_math import dot
from .kv_codes import words_to_floats
from .shim import jit, tl, triton

LOG2E = triton and tl.constexpr(1.4426950408889634)
LN2 = triton and tl.constexpr(0.6931471805599453)


@jit
def sequence_of_tile(cu_ptr, tile, seqs, BLOCK_Q: tl.constexpr):
    """The sequence whose tiles begin last at or before `tile`; those of sequence s begin at
    cu[s] // BLOCK_Q + s, which leaves room for one cut tile in each."""
    low = tile * 0
    high = low + seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit
def load_rows(ptr, at, valid, PARTS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Rows of WIDTH floats at `at`, as a tile [rows, PAD], and the next WIDTH where PARTS is 2."""
    channel = tl.arange(0, PAD)
    mask = valid[:, None] & (channel < WIDTH)[None, :]
    at = at[:, None] + channel[None, :]
    first = tl.load(ptr + at, mask=mask, other=0.0)
    if PARTS == 2:
        return first, tl.load(ptr + at + WIDTH, mask=mask, other=0.0)
    else:
        return first, first


@jit
def fit_rows(x0, x1, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Rows in the `dtype` that is multiplied with what codes become, and what each was divided by.

    bfloat16 rows become float16 ones, divided by the largest power of two within the row, so that
    neither range nor precision is lost: 8-bit codes become float16 in a third of the instructions.
    """
    if x0.dtype == dtype:
        return x0, x1, tl.full((x0.shape[0],), 1.0, tl.float32)
    else:
        peak = tl.max(tl.abs(x0.to(tl.float32)), 1)
        if PARTS == 2:
            peak = tl.maximum(peak, tl.max(tl.abs(x1.to(tl.float32)), 1))
        exponent = peak.to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
        fitted = (x0.to(tl.float32) * inverse).to(dtype)
        unit = exponent.to(tl.float32, bitcast=True)
        if PARTS == 2:
            return fitted, (x1.to(tl.float32) * inverse).to(dtype), unit
        else:
            return fitted, fitted, unit


@jit
def load_tile(
    pool, block, key, inside, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Entries of keys [keys], which lie in `block`, as a tile [keys, PAD] of rows of WIDTH, and
    each key's scale and offset, float16, where SCALES is "token".

    pool: pointers to codes, scales and offsets; where the head begins in the latter two; steps of
    codes from block to block and from slot to slot, in UNITs of entries; those of scales.
    """
    ptr, scale_ptr, offset_ptr, scale_first, block_step, slot_step, scale_block, scale_slot = pool
    channel = tl.arange(0, PAD)
    mask = inside[:, None]
    if WIDTH < PAD:
        mask = mask & (channel < WIDTH)[None, :]
    block, slot = block.to(tl.int64), key % BLOCK_SIZE
    at = (block * block_step + slot * slot_step) * UNIT
    x = tl.load(ptr + at[:, None] + channel[None, :], mask=mask, other=0)
    scale = inside.to(tl.float16)
    offset = scale
    if SCALES == "token":
        scale_at = scale_first + block * scale_block + slot * scale_slot
        scale = tl.load(scale_ptr + scale_at, mask=inside, other=1.0)
        if OFFSETS:
            offset = tl.load(offset_ptr + scale_at, mask=inside, other=0.0)
    return x, scale, offset


@jit
def unpack_tile(
    x, pool, block, key, inside, dtype: tl.constexpr, BLOCK_SIZE: tl.constexpr, BITS: tl.constexpr,
    IS_FP8: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile of `load_tile` as numbers [keys, PAD] in `dtype`; of 4 bits, its two halves.

    WIDTH, PAD: of rows in numbers. Scales of groups are applied, others are not, and E4M3 comes
    divided by `fp8_factor`.
    """
    _, scale_ptr, offset_ptr, scale_first, _, _, scale_block, scale_slot = pool
    scale_at = scale_first + block.to(tl.int64) * scale_block + key % BLOCK_SIZE * scale_slot
    channel = tl.arange(0, PAD)
    mask = inside[:, None] & (channel < WIDTH)[None, :]
    if BITS == 16:
        return x.to(dtype), x.to(dtype)
    elif BITS == 8:
        y = words_to_floats(x, "e4m3" if IS_FP8 else "byte", dtype, ASM)
        if SCALES == "group":
            y = dequantize_groups(y, scale_ptr, offset_ptr, scale_at, channel, mask, GROUP, OFFSETS)
        return y, y
    else:
        low = words_to_floats(x, "low", dtype, ASM)
        high = words_to_floats(x, "high", dtype, ASM)
        if SCALES == "group":
            low = dequantize_groups(
                low, scale_ptr, offset_ptr, scale_at, channel, mask, GROUP, OFFSETS
            )
            high = dequantize_groups(
                high, scale_ptr, offset_ptr, scale_at, channel + WIDTH, mask, GROUP, OFFSETS
            )
        return low, high


@jit
def dequantize_groups(
    x, scale_ptr, offset_ptr, at, channel, mask, GROUP: tl.constexpr, OFFSETS: tl.constexpr
):
    """x * scale + offset, a scale for each GROUP channels: in float32, rounded to x's dtype."""
    at = at[:, None] + (channel // GROUP)[None, :]
    y = x.to(tl.float32) * tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if OFFSETS:
        y += tl.load(offset_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return y.to(x.dtype)


@jit
def logits(
    q0, q1, q_unit, q_sum, k0, k1, k_scale, k_offset, v_scale, key, position, slope, softcap,
    window, PARTS: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr,
    V_SCALES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """A tile of logits in log2 [rows, keys], plus the log2 of the values' scales, -inf where a row
    does not see a key. q_unit, q_sum: of each row, what multiplies its product, and the offsets."""
    s = dot(q0, tl.trans(k0), tl.zeros((q0.shape[0], k0.shape[0]), tl.float32))
    if PARTS == 2:
        s = dot(q1, tl.trans(k1), s)
    s *= q_unit[:, None]
    if SCALES == "token":
        s *= k_scale.to(tl.float32)[None, :]
        if OFFSETS:
            s += q_sum[:, None] * k_offset.to(tl.float32)[None, :]
    if SOFTCAP:
        s = cap_logits(s, softcap) * LOG2E
    if ALIBI:
        s += slope[:, None] * (key[None, :] - position[:, None])
    if V_SCALES == "token":
        s += tl.log2(v_scale)[None, :]
    visible = key[None, :] <= position[:, None]
    if WINDOW:
        visible &= position[:, None] - key[None, :] < window
    return tl.where(visible, s, -float("inf"))


@jit
def cap_logits(s, softcap):
    """softcap * tanh(s / softcap)."""
    return softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))


@jit
def with_sink(lse, sinks_ptr, head, valid):
    """The log2 of the sum with the head's sink, and what a row's output becomes of: its share."""
    sink = tl.load(sinks_ptr + head, mask=valid, other=0.0) * LOG2E
    peak = tl.maximum(lse, sink)
    whole = peak + tl.log2(tl.exp2(lse - peak) + tl.exp2(sink - peak))
    return whole, tl.exp2(lse - whole)
