# pyright: reportAssignmentType=false, reportOperatorIssue=false
"""Device functions of the store: a head's channels as they are kept, their scales, their codes."""

from __future__ import annotations

from .kv_codes import LARGEST, SMALLEST_SCALE, float_to_e4m3, hadamard_rows, round_half_even
from .shim import jit, tl


@jit
def load_turned(
    ptr, at, channel, valid, rstd, weight_ptr, cos_ptr, sin_ptr, position, END: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Channels [n] below END of the heads at `at` [tokens], normed and turned, float32."""
    mask = valid[:, None] & (channel < END)[None, :]
    x = tl.load(ptr + at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + channel, mask=channel < END, other=0.0).to(tl.float32)
        x *= rstd[:, None] * weight[None, :]
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        turned = channel < ROTARY
        if INTERLEAVED:
            is_first, pair = channel % 2 == 0, channel // 2
            partner = channel ^ 1
        else:
            is_first = channel < HALF
            pair = tl.where(is_first, channel, channel - HALF)
            partner = tl.where(is_first, channel + HALF, channel - HALF)
        mask &= turned[None, :]
        y = tl.load(ptr + at[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(weight_ptr + partner, mask=turned, other=0.0).to(tl.float32)
            y *= rstd[:, None] * weight[None, :]
        table = position[:, None] * HALF + pair[None, :]
        cos = tl.load(cos_ptr + table, mask=mask, other=1.0)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0)
        x = x * cos + tl.where(is_first[None, :], -y, y) * sin
    return x


@jit
def quantize_tile(x, scale, offset, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
                  IS_FP8: tl.constexpr):  # fmt: skip
    """The codes of x, uint8 from 0 on, or E4M3's bits."""
    q = tl.div_rn(x - offset, scale)
    if IS_FP8:
        return float_to_e4m3(q)
    else:
        code = tl.minimum(tl.maximum(round_half_even(q), LOWEST), HIGHEST)
        return (code - LOWEST).to(tl.uint8)


@jit
def scale_of_range(low, high, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, CLIP: tl.constexpr,
                   OFFSETS: tl.constexpr):  # fmt: skip
    """Scale and offset, float16, of values from `low` to `high`: kv_quant's `choose_scales`."""
    if OFFSETS:
        width = tl.full(low.shape, HIGHEST - LOWEST, tl.float32)
        offset = low - tl.div_rn(LOWEST * (high - low), width)
        offset = tl.minimum(tl.maximum(offset, -LARGEST), LARGEST).to(tl.float16)
        moved = offset.to(tl.float32)
        top = tl.div_rn(high - moved, tl.full(low.shape, HIGHEST, tl.float32))
        bottom = tl.div_rn(low - moved, tl.full(low.shape, LOWEST, tl.float32))
        scale = tl.maximum(top, bottom) * CLIP
    else:
        offset = tl.zeros(low.shape, tl.float16)
        scale = tl.maximum(high, -low) * (CLIP / HIGHEST)
    return tl.minimum(tl.maximum(scale, SMALLEST_SCALE), LARGEST).to(tl.float16), offset


@jit
def load_head(
    ptr, at, valid, weight_ptr, cos_ptr, sin_ptr, position, eps, HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr, PAD: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, ROTATION: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Heads as they are kept, float32: one tile [TOKENS, PAD], or two of the halves."""
    HALF: tl.constexpr = HEAD_DIM // PARTS
    channel = tl.arange(0, PAD)
    rstd = position * 0.0
    if NORM:
        mask = valid[:, None] & (channel < HALF)[None, :]
        x = tl.load(ptr + at[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(x * x, 1)
        if PARTS == 2:
            at_high = at[:, None] + channel[None, :] + HALF
            x = tl.load(ptr + at_high, mask=mask, other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
        rstd = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
    if ROTATION > 1 and PARTS == 2:  # PAD is half of HEAD_DIM, a power of two
        x = load_turned(ptr, at, tl.arange(0, 2 * PAD), valid, rstd, weight_ptr, cos_ptr, sin_ptr,
                        position, HEAD_DIM, ROTARY, INTERLEAVED, NORM)  # fmt: skip
        x = hadamard_rows(x, TOKENS, 2 * PAD, ROTATION)
        low, high = tl.split(tl.permute(tl.reshape(x, (TOKENS, 2, PAD)), (0, 2, 1)))
        return low, high
    else:
        low = load_turned(ptr, at, channel, valid, rstd, weight_ptr, cos_ptr, sin_ptr, position,
                          HALF, ROTARY, INTERLEAVED, NORM)  # fmt: skip
        if PARTS == 2:
            high = load_turned(ptr, at, channel + HALF, valid, rstd, weight_ptr, cos_ptr, sin_ptr,
                               position, HEAD_DIM, ROTARY, INTERLEAVED, NORM)  # fmt: skip
            return low, high
        else:
            if ROTATION > 1:
                low = hadamard_rows(low, TOKENS, PAD, ROTATION)
            return low, low


@jit
def group_scales(
    x, stored, scale_ptr, offset_ptr, at, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    CLIP: tl.constexpr, OFFSETS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Scale and offset of each GROUP channels of a tile, stored, and spread over it, float32."""
    GROUPS: tl.constexpr = PAD // GROUP
    grouped = tl.reshape(x, (TOKENS, GROUPS, GROUP))
    scale, offset = scale_of_range(
        tl.min(grouped, 2), tl.max(grouped, 2), LOWEST, HIGHEST, CLIP, OFFSETS
    )
    group = tl.arange(0, GROUPS)
    mask = stored[:, None] & (group < WIDTH // GROUP)[None, :]
    tl.store(scale_ptr + at[:, None] + group[None, :], scale, mask=mask)
    if OFFSETS:
        tl.store(offset_ptr + at[:, None] + group[None, :], offset, mask=mask)
    shape: tl.constexpr = (TOKENS, GROUPS, GROUP)
    wide = tl.broadcast_to(scale.to(tl.float32)[:, :, None], shape)
    lift = tl.broadcast_to(offset.to(tl.float32)[:, :, None], shape)
    return tl.reshape(wide, (TOKENS, PAD)), tl.reshape(lift, (TOKENS, PAD))


@jit
def store_head(
    x0, x1, stored, code_ptr, scale_ptr, offset_ptr, static_ptr, at, scale_at, head,
    BITS: tl.constexpr, IS_FP8: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, CLIP: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Quantize a head's tile, or its halves, and store codes and scales where `stored`.

    WIDTH: channels of a tile. at, scale_at: [TOKENS], where the head of each token lies.
    """
    channel = tl.arange(0, PAD)
    mask = stored[:, None] & (channel < WIDTH)[None, :]
    code_at = code_ptr + at[:, None] + channel[None, :]
    if BITS == 16:
        tl.store(code_at, x0.to(code_ptr.dtype.element_ty), mask=mask)
    else:
        LOWEST: tl.constexpr = -448.0 if IS_FP8 else -(2.0 ** (BITS - 1))
        HIGHEST: tl.constexpr = 448.0 if IS_FP8 else 2.0 ** (BITS - 1) - 1.0
        if SCALES == "token":
            inside = (channel < WIDTH)[None, :]
            low = tl.min(tl.where(inside, x0, float("inf")), 1)
            high = tl.max(tl.where(inside, x0, -float("inf")), 1)
            if BITS == 4:
                low = tl.minimum(low, tl.min(tl.where(inside, x1, float("inf")), 1))
                high = tl.maximum(high, tl.max(tl.where(inside, x1, -float("inf")), 1))
            scale, offset = scale_of_range(low, high, LOWEST, HIGHEST, CLIP, OFFSETS)
            tl.store(scale_ptr + scale_at, scale, mask=stored)
            if OFFSETS:
                tl.store(offset_ptr + scale_at, offset, mask=stored)
            s0, o0 = scale.to(tl.float32)[:, None], offset.to(tl.float32)[:, None]
            s1, o1 = s0, o0
        elif SCALES == "group":
            s0, o0 = group_scales(x0, stored, scale_ptr, offset_ptr, scale_at, LOWEST, HIGHEST,
                                  CLIP, OFFSETS, GROUP, WIDTH, PAD, TOKENS)  # fmt: skip
            s1, o1 = s0, o0
            if BITS == 4:
                s1, o1 = group_scales(x1, stored, scale_ptr, offset_ptr, scale_at + WIDTH // GROUP,
                                      LOWEST, HIGHEST, CLIP, OFFSETS, GROUP, WIDTH, PAD,
                                      TOKENS)  # fmt: skip
        else:
            s0 = tl.load(static_ptr + head) + tl.zeros((TOKENS, 1), tl.float32)
            o0 = tl.zeros((TOKENS, 1), tl.float32)
            s1, o1 = s0, o0
        code = quantize_tile(x0, s0, o0, LOWEST, HIGHEST, IS_FP8)
        if BITS == 4:
            code |= quantize_tile(x1, s1, o1, LOWEST, HIGHEST, IS_FP8) << 4
        tl.store(code_at, code, mask=mask)
