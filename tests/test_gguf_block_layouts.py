"""One block of each GGUF type written by hand, as the layout's description has it."""

from __future__ import annotations

import struct

import pytest
import torch
from lowbit.quantize.gguf.blocks import codec

RAMP = list(range(16))
NIBBLES = bytes(low | (15 - low) << 4 for low in RAMP)  # weights 0-15 rise, 16-31 fall
TWO, HALF, MINUS_ONE = (struct.pack("<e", v) for v in (2.0, 0.5, -1.0))
FIFTH = bytes([0b00000001, 0, 0, 0b10000000])  # of weights 0 and 31
VALUES = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
WHOLE: list[tuple[str, bytes, list[float]]] = [
    ("F32", struct.pack("<2f", 1.5, -3.0), [1.5, -3.0]),
    ("F16", bytes([0x00, 0x3C, 0x00, 0xC2]), [1.0, -3.0]),
    ("BF16", bytes([0x80, 0x3F, 0x40, 0xC0]), [1.0, -3.0]),
    ("Q8_0", HALF + bytes([0, 1, 127, 128, 255]) + bytes(27), [0, 0.5, 63.5, -64, -0.5] + [0] * 27),
    ("Q4_0", TWO + NIBBLES, [2 * (q - 8) for q in RAMP] + [2 * (7 - q) for q in RAMP]),
    ("Q4_1", TWO + MINUS_ONE + NIBBLES, [2 * q - 1 for q in RAMP] + [29 - 2 * q for q in RAMP]),
    (
        "Q5_0",
        TWO + FIFTH + NIBBLES,
        [0] + [2 * (q - 16) for q in RAMP[1:]] + [2 * (-1 - q) for q in RAMP[:-1]] + [0],
    ),
    (
        "Q5_1",
        TWO + MINUS_ONE + FIFTH + NIBBLES,
        [31] + [2 * q - 1 for q in RAMP[1:]] + [29 - 2 * q for q in RAMP[:-1]] + [31],
    ),
    ("IQ4_NL", TWO + NIBBLES, [2 * VALUES[q] for q in RAMP] + [2 * v for v in VALUES[::-1]]),
    ("MXFP4", bytes([129]) + NIBBLES, [4 * v for v in E2M1] + [4 * v for v in E2M1[::-1]]),
]


@pytest.mark.parametrize(("name", "data", "values"), WHOLE, ids=[name for name, _, _ in WHOLE])
def test_block_written_by_hand(name: str, data: bytes, values: list[float]) -> None:
    block = torch.tensor([list(data)], dtype=torch.uint8)
    assert codec(name).decode(block).tolist() == [values]
    if codec(name).block == 1:
        assert torch.equal(codec(name).encode(torch.tensor([values])), block)


def values_of(name: str, data: bytes | bytearray) -> list[float]:
    return codec(name).decode(torch.tensor([list(data)], dtype=torch.uint8))[0].tolist()


def test_q2_k() -> None:
    """Weight 37 is of sub-block 2 and lies at shift 2 of byte 5."""
    scales, q = bytearray([0x01] * 16), bytearray(64)
    scales[2] = 0x53  # scale 3, minimum 5
    q[5] = 2 << 2
    q[63] = 3 << 6
    values = values_of("Q2_K", scales + q + HALF + TWO)
    assert (values[0], values[37], values[32], values[255]) == (0, 0.5 * 3 * 2 - 10, -10, 1.5)


def test_q3_k() -> None:
    """Weight 37 of sub-block 2: low bits at shift 2 of byte 5, high bit 1 of byte 5."""
    high, q, scales = bytearray(32), bytearray(64), bytearray(12)
    high[5] = 1 << 1
    q[5] = 3 << 2
    scales[2] = 0x01  # low four bits of scale 2
    scales[8 + 2] = 3  # its high bits: 1 + 48 - 32 = 17
    scales[7] = 0x20  # low bits of scale 15, whose high bits are 0: 2 - 32
    values = values_of("Q3_K", high + q + scales + HALF)
    assert (values[37], values[36], values[255]) == (0.5 * 17 * 3, 0.5 * 17 * -4, 0.5 * -30 * -4)


def test_q4_k() -> None:
    """Weight 37 of sub-block 1: high nibble of byte 5; sub-block 5 takes its top bits from 1."""
    scales, q = bytearray(12), bytearray(128)
    scales[1] = 7 | 2 << 6  # scale 1 is 7; scale 5 has 2 on top
    scales[5] = 3 | 1 << 6  # minimum 1 is 3; minimum 5 has 1 on top
    scales[9] = 0x95  # low bits: scale 5 is 5, minimum 5 is 9
    q[5] = 0xC0
    q[64] = 0x40  # weight 160: chunk 2, high nibble of byte 64
    values = values_of("Q4_K", HALF + TWO + scales + q)
    assert values[37] == 0.5 * 7 * 12 - 2 * 3
    assert values[160] == 0.5 * (5 + 32) * 4 - 2 * (9 + 16)


def test_q5_k() -> None:
    """Fifth bits: bit 1 of byte 5 is weight 37's, bit 7 of byte 31 weight 255's."""
    scales, high, q = bytearray(12), bytearray(32), bytearray(128)
    scales[1] = 7
    scales[11] = 0x01  # scale 7
    high[5], high[31] = 1 << 1, 1 << 7
    q[5] = 0xC0
    values = values_of("Q5_K", HALF + TWO + scales + high + q)
    assert (values[37], values[36], values[255]) == (0.5 * 7 * 28, 0, 0.5 * 16)


def test_q6_k() -> None:
    """Weight 0: level 5 - 32; weight 37: low bits 9 and high bits 2; weight 255: level 31."""
    low, high, scales = bytearray(128), bytearray(64), bytearray([1] * 16)
    low[0] = 0x05
    low[37] = 0x09  # row 1 of the first half: low nibble of byte 32 + 5
    high[5] = 2 << 2
    low[127] = 0xF0  # row 3 of the second half: high nibble of byte 64 + 32 + 31
    high[63] = 3 << 6
    scales[0] = 0xFF  # -1 for the first 16 weights
    scales[15] = 3
    values = values_of("Q6_K", low + high + scales + HALF)
    assert (values[0], values[1]) == (-0.5 * (5 - 32), -0.5 * -32)
    assert values[37] == 0.5 * (9 + 2 * 16 - 32)
    assert values[255] == 0.5 * 3 * (15 + 3 * 16 - 32)
    assert (values[254], values[128]) == (0.5 * 3 * -32, 0.5 * -32)


def test_iq4_xs() -> None:
    """Sub-block 3: low scale bits in the high nibble of byte 1, high ones at shift 6."""
    low, codes = bytearray(4), bytearray(128)
    low[1] = 0x50
    codes[3 * 16 + 5] = 0xF0  # weight 96 + 16 + 5
    values = values_of("IQ4_XS", TWO + struct.pack("<H", 2 << 6) + low + codes)
    assert values[117] == 2 * (5 + 32 - 32) * 113
    assert (values[96], values[0]) == (2 * 5 * -127, 2 * -32 * -127)


def test_tq1_0() -> None:
    """Byte 0 holds weights 0, 32, 64, 96, 128 as digits; byte 48 weights 240, 244, 248, 252."""
    first = -(-(2 * 81 + 0 * 27 + 1 * 9 + 2 * 3 + 0) * 256 // 243)
    last = -(-(0 * 81 + 2 * 27 + 1 * 9 + 2 * 3) * 256 // 243)
    values = values_of("TQ1_0", bytes([first]) + bytes(47) + bytes([last]) + bytes(3) + TWO)
    assert [values[i] for i in (0, 32, 64, 96, 128)] == [2, -2, 0, 2, -2]
    assert [values[i] for i in (240, 244, 248, 252)] == [-2, 2, 0, 2]


def test_tq2_0() -> None:
    q = bytearray([0b01010101] * 64)
    q[33] = 0b00100110  # weights 129, 161, 193, 225
    values = values_of("TQ2_0", q + TWO)
    assert [values[i] for i in (129, 161, 193, 225, 130)] == [2, 0, 2, -2, 0]
