"""Device functions of attention over blocks: which sequence, which keys, in what form they come."""

from __future__ import annotations

from .kv_codes import byte_to_float, nibble_to_float
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
def load_codes(
    ptr, scale_ptr, offset_ptr, at, scale_at, inside, dtype: tl.constexpr, BITS: tl.constexpr,
    IS_FP8: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys or values at `at`, as a tile [keys, PAD] in `dtype`; of 4 bits, its two halves.

    WIDTH: entries in a row. Scales of groups are applied, others are not, and E4M3 comes divided
    by FP8_FACTOR.
    """
    channel = tl.arange(0, PAD)
    mask = inside[:, None] & (channel < WIDTH)[None, :]
    x = tl.load(ptr + at[:, None] + channel[None, :], mask=mask, other=0)
    if BITS == 16:
        return x.to(dtype), x.to(dtype)
    elif BITS == 8:
        y = byte_to_float(x, IS_FP8, dtype, ASM)
        if SCALES == "group":
            y = dequantize_groups(y, scale_ptr, offset_ptr, scale_at, channel, mask, GROUP, OFFSETS)
        return y, y
    else:
        low = nibble_to_float(x, False, dtype, ASM)
        high = nibble_to_float(x, True, dtype, ASM)
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
