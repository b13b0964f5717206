# pyright: reportArgumentType=false
"""Device functions that turn stored KV codes into numbers, and numbers into codes.

The layout is that of kernels/kv_quant.py: a head's codes are bit planes (kernels/bitplanes.py), so
that a byte of a 4-bit head holds channel j in its low half and channel j + head_dim / 2 in its high
one, and a tile of bytes gives two tiles of codes without moving anything between threads. Codes
become floats by writing their bits into a float's mantissa and subtracting what that adds, which
takes no conversion instruction (on CUDA four at a time, in assembly); E4M3 becomes float16 by
shifting its bits into place, which makes it FP8_FACTOR times too small, to be multiplied into the
scale.
"""

from __future__ import annotations

from .. import kv_quant
from .shim import constexpr_function, jit, tl, triton

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


@constexpr_function
def _nibble_assembly(high, bf16):
    """PTX: the low or `high` nibbles of four bytes $2, less 8, in $0 and $1, two in each.

    prmt spreads two bytes over the halves of a register, lop3 takes a nibble of each and ors the
    magic exponent in (1024 in float16, 128 in bfloat16).
    """
    shift = "shr.u32 x, $2, 4;" if high else "mov.b32 x, $2;"
    magic = "0x43004300" if bf16 else "0x64006400"
    spread = "".join(
        f"prmt.b32 t{i}, x, z, {selector}; lop3.b32 t{i}, t{i}, 0x000f000f, {magic}, 0xea;"
        for i, selector in enumerate(("0x4140", "0x4342"))
    )
    if bf16:  # sm_80 has no sub.bf16x2: t * 1 - 136
        less = "".join(f"fma.rn.bf16x2 ${i}, t{i}, o, m;" for i in (0, 1))
        less = f"mov.b32 o, 0x3f803f80; mov.b32 m, 0xc308c308; {less}"
    else:
        less = "".join(f"sub.rn.f16x2 ${i}, t{i}, m;" for i in (0, 1))
        less = f"mov.b32 m, 0x64086408; {less}"
    return f"{{ .reg .b32 x, z, t0, t1, m, o; {shift} mov.b32 z, 0; {spread} {less} }}"


@jit
def nibble_to_float(x, HIGH: tl.constexpr, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Signed codes of the low or high halves of bytes x, in `dtype`."""
    if ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _nibble_assembly(HIGH, True), "=r,=r,r", [x], tl.bfloat16, is_pure=True, pack=4
        )
    elif ASSEMBLY and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _nibble_assembly(HIGH, False), "=r,=r,r", [x], tl.float16, is_pure=True, pack=4
        )
    elif HIGH:
        return unsigned_to_float(x >> 4, 8, dtype)
    else:
        return unsigned_to_float(x & 15, 8, dtype)


@jit
def e4m3_to_float(u, dtype: tl.constexpr):
    """What the bits u of E4M3 numbers stand for, divided by FP8_FACTOR, exactly, in `dtype`."""
    bits = u.to(tl.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(dtype)


BYTE_ASSEMBLY = triton and tl.constexpr(
    "{ .reg .b32 e, m; mov.b32 e, 0x64; mov.b32 m, 0x64806480;"
    " prmt.b32 $0, $2, e, 0x4140; prmt.b32 $1, $2, e, 0x4342;"
    " sub.rn.f16x2 $0, $0, m; sub.rn.f16x2 $1, $1, m; }"
)
"""PTX: four bytes $2, less 128, in float16: a byte below 0x64 is 1024 + byte."""


@jit
def byte_to_float(u, IS_FP8: tl.constexpr, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """8-bit codes as numbers, those of E4M3 divided by FP8_FACTOR."""
    if IS_FP8:
        return e4m3_to_float(u, dtype)
    elif ASSEMBLY and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            BYTE_ASSEMBLY, "=&r,=&r,r", [u], tl.float16, is_pure=True, pack=4
        )
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
