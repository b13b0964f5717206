"""Packing twins: round trips for every width and odd shapes, equal to compressed-tensors' words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.packing import pack_bits, packed_words, unpack_bits


def codes_of(num_bits: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-half, half, (rows, columns), generator=generator).to(torch.int8)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 100), st.integers(0, 1000))
def test_round_trip(num_bits: int, rows: int, columns: int, seed: int) -> None:
    codes = codes_of(num_bits, rows, columns, seed)
    words = pack_bits(codes, num_bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, packed_words(columns, num_bits))
    assert torch.equal(unpack_bits(words, num_bits, columns), codes)


@pytest.mark.parametrize("num_bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 72])
def test_words_are_those_of_compressed_tensors(num_bits: int, columns: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = codes_of(num_bits, 3, columns)
    assert torch.equal(pack_bits(codes, num_bits), helpers.pack_to_int32(codes, num_bits))


def test_hand_written_words() -> None:
    # 4 bits: code + 8, lowest nibble first
    codes = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, -1]], dtype=torch.int8)
    assert pack_bits(codes, 4).tolist() == [[0x7BA9F810]]
    # 3 bits: code 10 straddles the words, 2 bits below and 1 above
    codes = torch.full((1, 11), -4, dtype=torch.int8)
    codes[0, 10] = 1  # stored 5 = 0b101
    assert pack_bits(codes, 3).tolist() == [[0b01 << 30, 0b1]]


@pytest.mark.parametrize("num_bits", [0, 9])
def test_widths_out_of_range_are_refused(num_bits: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        pack_bits(torch.zeros(1, 4, dtype=torch.int8), num_bits)
