"""Device functions that turn stored KV codes into numbers, and numbers into codes.

The layout is that of kernels/kv_quant.py: a head's codes are bit planes (kernels/bitplanes.py), so
that a byte of a 4-bit head holds channel j in its low half and channel j + head_dim / 2 in its high
one, and a tile of bytes gives two tiles of codes without moving anything between threads. Codes
become floats by writing their bits into a float's mantissa and subtracting what that adds, which
takes no conversion instruction; E4M3 becomes float16 by shifting its bits into place, which makes
it FP8_FACTOR times too small, to be multiplied into the scale.
"""

from __future__ import annotations

from .. import kv_quant
from .shim import jit, tl, triton

FP8_FACTOR = triton and tl.constexpr(256.0)
SMALLEST_SCALE = triton and tl.constexpr(kv_quant.SMALLEST_SCALE)
LARGEST = triton and tl.constexpr(kv_quant.LARGEST)
ROUNDER = triton and tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to whole numbers


@jit
def unsigned_to_float(u, HALF: tl.constexpr, dtype: tl.constexpr):
    """u - HALF in `dtype`, exactly, of whole numbers u from 0 to 255 (bfloat16: to 2 * HALF)."""
    if dtype == tl.float16:
        x = (u.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        return x - (1024.0 + HALF)
    elif dtype == tl.bfloat16 and HALF <= 8:
        x = (u.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return x - (128.0 + HALF)
    else:
        x = (u.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
        return (x - (8388608.0 + HALF)).to(dtype)


@jit
def e4m3_to_float(u, dtype: tl.constexpr):
    """What the bits u of E4M3 numbers stand for, divided by FP8_FACTOR, exactly, in `dtype`."""
    bits = u.to(tl.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(dtype)


@jit
def byte_to_float(u, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """8-bit codes as numbers, those of E4M3 divided by FP8_FACTOR."""
    if IS_FP8:
        return e4m3_to_float(u, dtype)
    else:
        return unsigned_to_float(u, 128, dtype)


@jit
def round_half_even(x):
    """The nearest whole number, float32, |x| < 2^22."""
    return (x + ROUNDER) - ROUNDER


@jit
def float_to_e4m3(x):
    """The bits, uint8, of the nearest E4M3 numbers of x float32, ties to even, saturated at 448."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    whole = magnitude.to(tl.uint32, bitcast=True)
    # drop 20 of 23 bits of mantissa; the exponent's bias goes from 127 to 7
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    small = round_half_even(magnitude * 512.0).to(tl.uint32)  # below 2^-6 a step is 2^-9
    code = tl.where(magnitude < 0.015625, small, normal)
    return (sign | code).to(tl.uint8)


@jit
def hadamard_rows(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """x [ROWS, WIDTH] float32 through an orthonormal Hadamard matrix in blocks of SIZE, a power of
    two that divides WIDTH: `rotate_heads`, by butterflies."""
    for step in tl.static_range(0, 10):  # pyright: ignore[reportGeneralTypeIssues]
        if (1 << step) < SIZE:
            x = tl.reshape(x, (ROWS, WIDTH // (2 << step), 2, 1 << step))
            a, b = tl.split(tl.permute(x, (0, 1, 3, 2)))
            x = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
            x = tl.reshape(x, (ROWS, WIDTH))
    return x * (SIZE**-0.5)
