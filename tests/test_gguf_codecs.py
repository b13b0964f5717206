"""Block types: bytes against gguf's and llama.cpp's own encoders, and blocks written by hand."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.quantize.gguf.codecs import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    SLICE,
    AffineCodec,
    Codec,
    SymmetricCodec,
)
from lowbit.quantize.gguf.mix import CODECS
from lowbit.quantize.gguf.q6_k import Q6_K
from torch import Tensor

from .gguf_models import llama_cpp_blocks

PLAIN = [c for c in CODECS.values() if c is not Q6_K]  # the types that gguf itself can write
ALL = list(CODECS.values())


def normal(rows: int = 32, columns: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


ROWS = {
    "random": normal(),
    "weights": (normal(seed=1) * 0.02).to(torch.float16).float(),
    "outliers": normal(seed=2) * torch.where(torch.arange(512) % 37 == 0, 40.0, 1.0),
    "constant": torch.full((4, 256), 0.37),
    "negative": torch.full((4, 256), -1.25),
    "zero": torch.zeros(4, 256),
    "one entry": torch.eye(256)[:8],
    "ties": torch.randint(-8, 9, (32, 512), generator=torch.Generator().manual_seed(3)) / 2.0,
    "positive": normal(seed=4).abs(),
    "large": normal(seed=5) * 1e4,
    "tiny": normal(seed=6) * 1e-6,
    "tinier": normal(seed=7) * 1e-30,
    "subnormal": normal(seed=8) * 1e-41,
}


def gguf_blocks(x: Tensor, codec: type[Codec]) -> Tensor:
    with np.errstate(all="ignore"):
        data = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[codec.name])
    return torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).reshape(x.shape[0], -1))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("codec", PLAIN, ids=lambda c: c.name)
def test_bytes_are_those_of_gguf(codec: type[Codec], rows: str) -> None:
    x = ROWS[rows]
    assert torch.equal(codec.encode(x), gguf_blocks(x, codec))


@pytest.mark.parametrize("codec", PLAIN, ids=lambda c: c.name)
def test_huge_rows_have_the_bytes_of_gguf(codec: type[Codec]) -> None:
    """Scales overflow float16 here: no model has such weights and export refuses them."""
    x = normal() * 1e30
    assert torch.equal(codec.encode(x), gguf_blocks(x, codec))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("codec", [c for c in ALL if c is not F32], ids=lambda c: c.name)
def test_bytes_are_those_of_llama_cpp(codec: type[Codec], rows: str) -> None:
    x = ROWS[rows]
    assert torch.equal(codec.encode(x), llama_cpp_blocks(x, codec))


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.name)
def test_decoding_is_gguf_s(codec: type[Codec]) -> None:
    """On bytes drawn at random, so that every field takes every value; NaN where gguf has NaN."""
    shape = (64, 8 * codec.nbytes)
    data = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(9))
    data = data.to(torch.uint8)
    with np.errstate(all="ignore"):
        kind = gguf.GGMLQuantizationType[codec.name]
        expected = torch.from_numpy(np.array(gguf.quants.dequantize(data.numpy(), kind)))
    torch.testing.assert_close(codec.decode(data), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", PLAIN, ids=lambda c: c.name)
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32),
    exponent=st.integers(-40, 0),
)
def test_any_block_has_the_bytes_of_gguf(
    codec: type[Codec], values: list[float], exponent: int
) -> None:
    x = torch.tensor([values]) * 2.0**exponent
    assert torch.equal(codec.encode(x), gguf_blocks(x, codec))


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.name)
def test_rows_are_independent_and_slices_do_not_show(codec: type[Codec]) -> None:
    x = normal(SLICE // 256 + 3, 256)
    encoded = codec.encode(x)
    assert encoded.shape == (x.shape[0], codec.row_bytes(256))
    for row in (0, 1, SLICE // 256, x.shape[0] - 1):
        assert torch.equal(encoded[row : row + 1], codec.encode(x[row : row + 1]))
    decoded = codec.decode(encoded)
    assert torch.equal(decoded[-2:], codec.decode(encoded[-2:]))


@pytest.mark.parametrize(
    ("codec", "limit"),
    [(Q8_0, 0.006), (Q6_K, 0.02), (Q5_1, 0.04), (Q5_0, 0.05), (Q4_1, 0.08), (Q4_0, 0.09)],
    ids=lambda v: getattr(v, "name", ""),
)
def test_relative_error_of_normal_weights(codec: type[Codec], limit: float) -> None:
    x = normal(64, 1024)
    error = (codec.decode(codec.encode(x)) - x).norm() / x.norm()
    assert limit / 2 < error < limit


# Blocks by hand: the bytes as the layout's description has them, and the values they stand for.
RAMP = list(range(16))
NIBBLES = bytes(low | (15 - low) << 4 for low in RAMP)  # weights 0-15 rise, 16-31 fall
TWO, HALF, MINUS_ONE = (struct.pack("<e", v) for v in (2.0, 0.5, -1.0))
FIFTH = bytes([0b00000001, 0, 0, 0b10000000])  # of weights 0 and 31
HAND_WRITTEN: list[tuple[type[Codec], bytes, list[float]]] = [
    (F32, struct.pack("<2f", 1.5, -3.0), [1.5, -3.0]),
    (F16, bytes([0x00, 0x3C, 0x00, 0xC2]), [1.0, -3.0]),
    (BF16, bytes([0x80, 0x3F, 0x40, 0xC0]), [1.0, -3.0]),
    (Q8_0, HALF + bytes([0, 1, 127, 128, 255]) + bytes(27), [0, 0.5, 63.5, -64, -0.5] + [0] * 27),
    (Q4_0, TWO + NIBBLES, [2 * (q - 8) for q in RAMP] + [2 * (7 - q) for q in RAMP]),
    (Q4_1, TWO + MINUS_ONE + NIBBLES, [2 * q - 1 for q in RAMP] + [29 - 2 * q for q in RAMP]),
    (
        Q5_0,
        TWO + FIFTH + NIBBLES,
        [0] + [2 * (q - 16) for q in RAMP[1:]] + [2 * (-1 - q) for q in RAMP[:-1]] + [0],
    ),
    (
        Q5_1,
        TWO + MINUS_ONE + FIFTH + NIBBLES,
        [31] + [2 * q - 1 for q in RAMP[1:]] + [29 - 2 * q for q in RAMP[:-1]] + [31],
    ),
]


@pytest.mark.parametrize(("codec", "data", "values"), HAND_WRITTEN, ids=lambda v: "")
def test_hand_written_block(codec: type[Codec], data: bytes, values: list[float]) -> None:
    block = torch.tensor([list(data)], dtype=torch.uint8)
    assert codec.decode(block).tolist() == [values]
    if codec in (F32, F16, BF16):
        assert torch.equal(codec.encode(torch.tensor([values])), block)


def test_hand_written_block_q6_k() -> None:
    """Weight 0: level 5 - 32; weight 37: low bits 9 and high bits 2; weight 255: level 31."""
    ql, qh, scales = bytearray(128), bytearray(64), bytearray([1] * 16)
    ql[0] = 0x05
    ql[37] = 0x09  # row 1 of the first half: low nibble of byte 32 + 5
    qh[5] = 2 << 2
    ql[127] = 0xF0  # row 3 of the second half: high nibble of byte 64 + 32 + 31
    qh[63] = 3 << 6
    scales[0] = 0xFF  # -1 for the first 16 weights
    scales[15] = 3
    data = torch.tensor([list(ql + qh + scales + HALF)], dtype=torch.uint8)
    values = Q6_K.decode(data)[0]
    assert values[0] == -0.5 * (5 - 32)
    assert values[1] == -0.5 * -32
    assert values[37] == 0.5 * (9 + 2 * 16 - 32)
    assert values[255] == 0.5 * 3 * (15 + 3 * 16 - 32)
    assert values[254] == 0.5 * 3 * -32
    assert values[128] == 0.5 * -32


@pytest.mark.parametrize("codec", [Q8_0, Q4_0, Q5_0], ids=lambda c: c.name)
def test_pack_keeps_given_levels(codec: type[SymmetricCodec]) -> None:
    generator = torch.Generator().manual_seed(10)
    levels = torch.randint(codec.low, codec.high + 1, (64, 32), generator=generator)
    d = (torch.rand(64, 1, generator=generator) - 0.5).to(torch.float16).float()
    blocks = codec.pack(d, levels.to(torch.int8))
    assert torch.equal(codec.decode(blocks.view(8, -1)).view(64, 32), d * levels)


@pytest.mark.parametrize("codec", [Q4_1, Q5_1], ids=lambda c: c.name)
def test_pack_keeps_given_codes(codec: type[AffineCodec]) -> None:
    generator = torch.Generator().manual_seed(11)
    q = torch.randint(0, codec.high + 1, (64, 32), generator=generator)
    d, m = torch.rand(2, 64, 1, generator=generator).to(torch.float16).float()
    blocks = codec.pack(d, m, q.to(torch.int8))
    assert torch.equal(codec.decode(blocks.view(8, -1)).view(64, 32), d * q + m)
