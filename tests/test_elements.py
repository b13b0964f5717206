"""What a code can be: every one of the 256 E4M3 values, the 16 E2M1 ones, ties, MX exponents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.affine import dequantize_affine, quantize_affine, stored_scale_value
from lowbit.kernels.elements import E2M1, E4M3, int_elements, mx_exponents
from lowbit.kernels.packing import pack_e2m1, unpack_e2m1

EVERY_E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EVERY_E2M1 = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])


def test_all_256_fp8_codes_are_torchs_casts() -> None:
    """Each value quantizes to its own code and back; the two NaNs stay NaN."""
    values = EVERY_E4M3.float().view(2, 128)
    one = torch.ones(1, 1)
    codes = quantize_affine(values, one, None, E4M3)
    assert torch.equal(codes.view(torch.uint8).view(-1), torch.arange(256).to(torch.uint8))
    back = dequantize_affine(codes, one, None)
    assert torch.equal(back.nan_to_num(7.0), values.nan_to_num(7.0))
    assert int(back.isnan().sum()) == 2


def test_between_fp8_values_rounds_as_torch_casts_and_saturates() -> None:
    finite = EVERY_E4M3.float()[:127]
    between = (finite[:-1] + finite[1:]) / 2
    x = torch.cat([between, -between, between * 1.001, between * 0.999])
    assert torch.equal(E4M3.snap_(x.clone()), x.to(torch.float8_e4m3fn).float())
    beyond = torch.tensor([448.0, 449.0, 464.0, 1e9, torch.inf])
    assert (E4M3.snap_(beyond.clone()) == 448).all() and (E4M3.snap_(-beyond) == -448).all()


def test_e2m1_takes_the_nearest_and_ties_go_to_the_even_mantissa() -> None:
    x = torch.linspace(-7, 7, 5601)
    distance = (x.unsqueeze(1) - EVERY_E2M1).abs()
    got = E2M1.snap_(x.clone())
    assert torch.allclose((got - x).abs(), distance.amin(1), atol=1e-6)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.snap_(ties.clone()).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert E2M1.snap_(-ties).tolist() == [0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    assert E2M1.snap_(torch.tensor([torch.inf, -torch.inf])).tolist() == [6.0, -6.0]


@pytest.mark.parametrize("bits", range(2, 9))
def test_whole_numbers_saturate_at_their_ends(bits: int) -> None:
    codes = int_elements(bits)
    ends = codes.snap_(torch.tensor([-1e9, 1e9, 0.5, 1.5, -0.5]))
    assert ends.tolist() == [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0.0, min(2, codes.highest), 0]


def test_e2m1_nibbles_by_hand() -> None:
    """The first of two in the low nibble; bit 3 is the sign, the rest indexes the magnitudes."""
    row = torch.tensor([[0.5, -6.0, 2.0, 1.5, -0.0, 0.0]]).to(torch.float8_e4m3fn)
    assert pack_e2m1(row).tolist() == [[0x1 | 0xF << 4, 0x4 | 0x3 << 4, 0x8 | 0x0 << 4]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(0, 40), st.integers(0, 9999))
def test_e2m1_packing_round_trips(rows: int, pairs: int, seed: int) -> None:
    index = torch.randint(16, (rows, 2 * pairs), generator=torch.Generator().manual_seed(seed))
    codes = EVERY_E2M1[index].to(torch.float8_e4m3fn)
    packed = pack_e2m1(codes)
    assert packed.shape == (rows, pairs) and packed.dtype == torch.uint8
    assert torch.equal(unpack_e2m1(packed).view(torch.uint8), codes.view(torch.uint8))


def test_every_packed_byte_is_what_compressed_tensors_unpacks() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    packed = torch.arange(256).to(torch.uint8).view(4, 64)
    theirs = helpers.unpack_fp4_from_uint8(packed, 4, 128, dtype=torch.float32)
    assert torch.equal(unpack_e2m1(packed).float(), theirs)


@pytest.mark.parametrize(("elements", "bits"), [(E2M1, 4), (E4M3, 8)])
def test_mx_exponents_are_those_of_compressed_tensors(elements, bits) -> None:
    mx = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    mantissas = torch.linspace(1, 1.99999, 41)
    peak = (mantissas * 2.0 ** torch.arange(-100, 110, 7).unsqueeze(1)).flatten()
    peak = torch.cat([peak, torch.nextafter(peak, torch.zeros(()))])
    theirs = mx.generate_mx_scales(peak, bits).clamp(0, 254) - 127
    assert torch.equal(mx_exponents(peak, elements), theirs)
    assert mx_exponents(torch.tensor([0.0, 1e-45]), elements).tolist() == [-127, -127]


def test_an_mx_scale_lets_only_the_last_seventh_of_e2m1_saturate() -> None:
    peak = torch.linspace(1, 4, 3001)
    reached = [peak / mx_exponents(peak, elements).exp2() for elements in (E2M1, E4M3)]
    assert 6 < reached[0].max() < 7 and reached[0].min() >= 3.5
    assert reached[1].max() < 448 and reached[1].min() >= 224


def test_stored_scales() -> None:
    exponents = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8)
    assert stored_scale_value(exponents).tolist() == [2.0**e for e in (-127, -126, -1, 0, 1, 127)]
    eighths = torch.tensor([8.0, 448.0]).to(torch.float8_e4m3fn)
    assert stored_scale_value(eighths, torch.tensor([2.0])).tolist() == [4.0, 224.0]
    assert stored_scale_value(torch.tensor([0.5]).bfloat16()).dtype == torch.float32
