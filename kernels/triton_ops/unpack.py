# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Codes out of packed words without a conversion of whole numbers to floats.

A small unsigned code in the low bits of a float's significand, under a fixed exponent, is the float
2^p + code, p the width of the significand: 10 bits for float16, 7 for bfloat16. Taking 2^p + zero
away leaves code - zero, exactly. On CUDA the and-or of two neighbours is one `lop3` on a register
of two halves, the subtraction one packed instruction; elsewhere the same is said in plain Triton.
The 7 bits of bfloat16 do not hold 8-bit codes: those are put together from two nibbles.
"""

from __future__ import annotations

from .shim import constexpr_function, jit, tl


@constexpr_function
def _pair(half):
    """The same 16 bits in both halves of a register."""
    return f"{half << 16 | half:#010x}"


@constexpr_function
def _magic(bf16):
    """1024 in float16 or 128 in bfloat16, twice: codes are or-ed into them."""
    return _pair(0x4300 if bf16 else 0x6400)


@constexpr_function
def unpack_assembly(width, shift, bf16):
    """PTX for a pair of codes of `width` bits: $0 = codes at `shift` in words $1, less $2."""
    magic, mask = _magic(bf16), _pair(15 if bf16 and width == 8 else (1 << width) - 1)
    take = f"shr.u32 t, $1, {shift}; lop3.b32 t, t, {mask}, {magic}, 0xea;"
    if not bf16:
        return f"{{ .reg .b32 t; {take} sub.rn.f16x2 $0, t, $2; }}"
    # sm_80 has no sub.bf16x2: a * -1 + b
    less = f"mov.b32 m, {_pair(0xBF80)};"
    if width < 8:
        return f"{{ .reg .b32 t, m; {take} {less} fma.rn.bf16x2 $0, $2, m, t; }}"
    return f"""{{
    .reg .b32 t, h, m, c, d;
    {take} {less}
    shr.u32 h, $1, {shift + 4}; lop3.b32 h, h, {mask}, {magic}, 0xea;
    mov.b32 c, {_pair(0x4180)}; mov.b32 d, {_pair(0xC500)};
    fma.rn.bf16x2 h, h, c, d;
    fma.rn.bf16x2 h, $2, m, h;
    mov.b32 c, {_pair(0x3F80)}; mov.b32 d, {magic};
    fma.rn.bf16x2 t, d, m, t;
    fma.rn.bf16x2 $0, t, c, h;
    }}"""


@constexpr_function
def unpack_assembly_3(shift, bit, bf16):
    """As `unpack_assembly` for 3 bits: two of them at `shift` in $1, the third at `bit` in $2, less
    $3."""
    magic = _magic(bf16)
    move = f"shr.u32 h, $2, {bit - 2};" if bit >= 2 else f"shl.b32 h, $2, {2 - bit};"
    take = (
        f"shr.u32 t, $1, {shift}; lop3.b32 t, t, {_pair(3)}, {magic}, 0xea;"
        f" {move} lop3.b32 t, h, {_pair(4)}, t, 0xea;"
    )
    if not bf16:
        return f"{{ .reg .b32 t, h; {take} sub.rn.f16x2 $0, t, $3; }}"
    return (
        f"{{ .reg .b32 t, h, m; {take} mov.b32 m, {_pair(0xBF80)}; fma.rn.bf16x2 $0, $3, m, t; }}"
    )


@jit
def magic_zero(zero, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """The operand that `unpack` takes away for unsigned zero-points int32: 2^p + zero in DTYPE, or
    zero where 2^p + code is not what codes are read as."""
    if tl.float16 == DTYPE:
        result = (zero | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    elif BITS == 8:
        result = zero.to(tl.float32).to(tl.bfloat16)
    else:
        result = (zero | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return result


@jit
def unpack(words, zero, WIDTH: tl.constexpr, SHIFT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Codes less zero, in zero's dtype: WIDTH bits at SHIFT in words int16, zero (`magic_zero`) of
    the same shape."""
    BF16: tl.constexpr = zero.dtype == tl.bfloat16
    if ASSEMBLY:
        result = tl.inline_asm_elementwise(
            unpack_assembly(WIDTH, SHIFT, BF16),
            "=r,r,r",
            [words, zero],
            dtype=zero.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        result = _less_zero((words >> SHIFT) & ((1 << WIDTH) - 1), zero, WIDTH)
    return result


@jit
def unpack_3(low, high, zero, SHIFT: tl.constexpr, BIT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """As `unpack` for 3 bits: two of them at SHIFT in `low`, the third at BIT in `high`."""
    BF16: tl.constexpr = zero.dtype == tl.bfloat16
    if ASSEMBLY:
        result = tl.inline_asm_elementwise(
            unpack_assembly_3(SHIFT, BIT, BF16),
            "=r,r,r,r",
            [low, high, zero],
            dtype=zero.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        result = _less_zero(((low >> SHIFT) & 3) | (((high >> BIT) & 1) << 2), zero, 3)
    return result


@jit
def _less_zero(codes, zero, WIDTH: tl.constexpr):
    if zero.dtype == tl.float16:
        result = (codes | 0x6400).to(tl.float16, bitcast=True) - zero
    elif WIDTH == 8:
        low = ((codes & 15) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
        high = ((codes >> 4) | 0x4300).to(tl.bfloat16, bitcast=True) * 16.0 - 2048.0
        result = ((high - zero) + low).to(tl.bfloat16)
    else:
        result = (codes | 0x4300).to(tl.bfloat16, bitcast=True) - zero
    return result
