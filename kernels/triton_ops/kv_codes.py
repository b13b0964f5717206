# pyright: reportArgumentType=false
"""Device functions that turn stored KV codes into numbers, and numbers into codes.

The layout is that of kernels/kv_quant.py: a head's codes are bit planes (kernels/bitplanes.py), so
that a byte of a 4-bit head holds channel j in its low half and channel j + head_dim / 2 in its high
one, and a tile of bytes gives two tiles of codes without moving anything between threads. Codes
become floats by writing their bits into a float's mantissa and subtracting what that adds, which
takes no conversion instruction (on CUDA four at a time, in assembly); E4M3 becomes float16 by
shifting its bits into place, which makes it 256 times too small, or by the hardware (`fp8_factor`).
"""

from __future__ import annotations

from .. import kv_quant
from .shim import constexpr_function, jit, tl, triton

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
def _pairs_assembly(kind, bf16):
    """PTX: four bytes $4 as 16-bit floats $0 to $3. kind: "byte" (less 128), "low" or "high" (of
    each byte, a nibble less 8), "e4m3" (divided by 256), "e4m3 native".

    prmt spreads two bytes over the halves of a register; there lop3 takes nibbles and ors the
    magic exponent in (1024 in float16, 128 in bfloat16), which a byte gets from prmt itself. E4M3
    comes with its sign repeated above it: a shift puts the exponent in place, one sign is kept.
    """
    if kind == "e4m3 native":
        return (
            "{ .reg .b32 t0, t1; .reg .b16 l, h; mov.b32 {l, h}, $4;"
            " cvt.rn.f16x2.e4m3x2 t0, l; cvt.rn.f16x2.e4m3x2 t1, h;"
            " mov.b32 {$0, $1}, t0; mov.b32 {$2, $3}, t1; }"
        )
    selectors = {"byte": ("0x4140", "0x4342"), "e4m3": ("0x9180", "0xb3a2")}
    first, second = selectors.get(kind, ("0x4140", "0x4342"))
    before = {"byte": "mov.b32 z, 0x64;", "high": "shr.u32 x, x, 4; mov.b32 z, 0;"}
    spread = f"mov.b32 x, $4; {before.get(kind, 'mov.b32 z, 0;')}"
    if kind == "byte":
        take, less = "", "mov.b32 m, 0x64806480; sub.rn.f16x2 t, t, m;"
    elif kind == "e4m3":
        take, less = "shl.b32 t, t, 7; and.b32 t, t, 0xbf80bf80;", ""
    elif bf16:  # sm_80 has no sub.bf16x2: t * 1 - 136
        take = "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"
        less = "mov.b32 o, 0x3f803f80; mov.b32 m, 0xc308c308; fma.rn.bf16x2 t, t, o, m;"
    else:
        take = "lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea;"
        less = "mov.b32 m, 0x64086408; sub.rn.f16x2 t, t, m;"
    pairs = "".join(
        f" prmt.b32 t, x, z, {selector}; {take} {less} mov.b32 {{${2 * i}, ${2 * i + 1}}}, t;"
        for i, selector in enumerate((first, second))
    )
    return f"{{ .reg .b32 x, z, t, m, o; {spread}{pairs} }}"


@jit
def _by_assembly(words, KIND: tl.constexpr, dtype: tl.constexpr):
    a, b, c, d = tl.inline_asm_elementwise(
        _pairs_assembly(KIND, dtype == tl.bfloat16), "=h,=h,=h,=h,r", [words],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    return (
        a.to(dtype, bitcast=True), b.to(dtype, bitcast=True), c.to(dtype, bitcast=True),
        d.to(dtype, bitcast=True),
    )  # fmt: skip


@jit
def _byte_to_float(u, KIND: tl.constexpr, dtype: tl.constexpr):
    """Bytes u, uint32, as `_pairs_assembly` takes them."""
    if KIND == "byte":
        return unsigned_to_float(u, 128, dtype)
    elif KIND == "low":
        return unsigned_to_float(u & 15, 8, dtype)
    elif KIND == "high":
        return unsigned_to_float(u >> 4, 8, dtype)
    else:
        return e4m3_to_float(u, dtype)


@jit
def words_to_floats(words, KIND: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """int32 words [keys, n] of four bytes each as floats [keys, 4 n] in `dtype`; KIND: what is in a
    byte, see `_pairs_assembly`. ASM: the CUDA architecture, 0 elsewhere."""
    if KIND == "e4m3" and ASM > 0 and dtype == tl.float16:
        a, b, c, d = _by_assembly(words, "e4m3 native" if ASM >= 89 else "e4m3", dtype)
    elif ASM > 0 and (
        dtype == tl.float16 or (dtype == tl.bfloat16 and (KIND == "low" or KIND == "high"))
    ):
        a, b, c, d = _by_assembly(words, KIND, dtype)
    else:
        u = words.to(tl.uint32, bitcast=True)
        a, b = _byte_to_float(u & 255, KIND, dtype), _byte_to_float((u >> 8) & 255, KIND, dtype)
        c, d = _byte_to_float((u >> 16) & 255, KIND, dtype), _byte_to_float(u >> 24, KIND, dtype)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 4 * words.shape[1]))


@jit
def e4m3_to_float(u, dtype: tl.constexpr):
    """What the bits u of E4M3 numbers stand for, divided by 256, exactly, in `dtype`."""
    bits = u.to(tl.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(dtype)


@constexpr_function
def fp8_factor(asm, dtype):
    """What E4M3 numbers out of `words_to_floats` must be multiplied by."""
    return 1.0 if asm >= 89 and dtype == tl.float16 else 256.0


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
