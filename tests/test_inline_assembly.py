"""The kernels' inline assembly, which the interpreter leaves out, for every code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowbit.kernels.triton_ops.a8_gemm import _halves_assembly
from lowbit.kernels.triton_ops.kv_codes import _pairs_assembly, fp8_factor
from lowbit.kernels.triton_ops.unpack import unpack_assembly, unpack_assembly_3

from .ptx import halves, run

DTYPES = [torch.float16, torch.bfloat16]


def plain(function, *arguments):
    """A compile-time function's own result."""
    return getattr(function, "__wrapped__", function)(*arguments)


def magic(zero: int, bits: int, dtype: torch.dtype) -> int:
    """What `magic_zero` makes of a zero-point, twice in a register."""
    if dtype == torch.float16:
        half = 0x6400 | zero
    elif bits < 8:
        half = 0x4300 | zero
    else:
        half = int(torch.tensor(float(zero)).bfloat16().view(torch.int16)) & 0xFFFF
    return half | half << 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_of_a_plane(bits, dtype):
    """Both halves of a word at every shift, beside bits that are all set, less a zero-point."""
    mask = (1 << bits) - 1
    for shift in range(0, 16, bits):
        assembly = plain(unpack_assembly, bits, shift, dtype == torch.bfloat16)
        for code in range(1 << bits):
            other, zero = mask - code, (5 * code + 3) & mask
            word = (0xFFFF & ~(mask << shift)) | code << shift
            upper = (0xFFFF & ~(mask << shift)) | other << shift
            (made,) = run(assembly, 1, [word | upper << 16, magic(zero, bits, dtype)])
            assert halves(made, dtype) == [code - zero, other - zero], (shift, code)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_of_two_planes(dtype):
    for slot in range(16):
        shift = 2 * (slot % 8)
        assembly = plain(unpack_assembly_3, shift, slot, dtype == torch.bfloat16)
        for code in range(8):
            other = 7 - code
            low = [(0xFFFF & ~(3 << shift)) | (c & 3) << shift for c in (code, other)]
            high = [(0xFFFF & ~(1 << slot)) | (c >> 2) << slot for c in (code, other)]
            registers = [low[0] | low[1] << 16, high[0] | high[1] << 16, magic(5, 3, dtype)]
            (made,) = run(assembly, 1, registers)
            assert halves(made, dtype) == [code - 5, other - 5], (slot, code)


@pytest.mark.parametrize("high", [False, True])
def test_halves_of_bytes(high):
    for byte in range(256):
        other = 255 - byte
        (made,) = run(plain(_halves_assembly, high), 1, [byte | other << 8 | byte << 16])
        taken = [(b & 0xF0) if high else (b << 4 & 0xF0) for b in (byte, other, byte, 0)]
        assert made == sum(b << 8 * i for i, b in enumerate(taken))


def floats_of(kind: str, dtype: torch.dtype, bytes_: list[int]) -> list[float]:
    word = sum(b << 8 * i for i, b in enumerate(bytes_))
    made = run(plain(_pairs_assembly, kind, dtype == torch.bfloat16), 4, [word])
    return [halves(register, dtype)[0] for register in made]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("byte", torch.float16), ("low", torch.float16), ("high", torch.float16),
     ("low", torch.bfloat16), ("high", torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_whole_numbers_of_keys_and_values(kind, dtype):
    value = {
        "byte": lambda b: b - 128, "low": lambda b: (b & 15) - 8, "high": lambda b: (b >> 4) - 8,
    }[kind]  # fmt: skip
    for byte in range(256):
        some = [byte, 255 - byte, (7 * byte + 1) % 256, byte ^ 0x55]
        assert floats_of(kind, dtype, some) == [value(b) for b in some]


@pytest.mark.parametrize(("kind", "arch"), [("e4m3", 80), ("e4m3 native", 90)])
def test_eight_bit_floats_of_keys_and_values(kind, arch):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).double().tolist()
    import triton.language as tl

    factor = plain(fp8_factor, arch, tl.float16)
    for byte in (b for b in range(256) if b & 0x7F != 0x7F):  # those are no numbers, nor stored
        some = [byte, 255 - byte if byte & 0x7F else 1, 0x7E, 0x80]
        some = [b if b & 0x7F != 0x7F else 2 for b in some]
        made = [x * factor for x in floats_of(kind, torch.float16, some)]
        assert made == [expected[b] for b in some]
