"""Errors that a scheme explains are told from damaged codes, in every scheme."""

from __future__ import annotations

import pytest
import torch
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.spec import scheme_from_name
from lowbit.quantize.verification.deviations import blockwise, deviation
from torch import Tensor

SCHEMES = {
    "W3A16": 32, "W4A16": 32, "W4A16_ASYM": 32, "W5A16": 32, "W6A16": 32, "W8A16": 32,
    "W8A8": None, "FP8_DYNAMIC": None, "FP8_BLOCK": None, "NVFP4A16": None, "MXFP4A16": None,
}  # fmt: skip


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def weight() -> Tensor:
    made = torch.randn(256, 512, generator=generator())
    return made * torch.rand(256, 1, generator=generator())


def damaged(q: Quantized, count: int) -> Quantized:
    """`count` codes replaced: whole numbers by any others, bytes of floats by any but NaN,
    floats of 4 bits by those of other places."""
    codes, rng = q.codes.clone().flatten(), generator()
    places = torch.randperm(codes.numel(), generator=rng)[:count]
    if q.spec.type == "int":
        end = 1 << (q.spec.num_bits - 1)
        codes[places] = torch.randint(-end, end, (count,), generator=rng).to(codes.dtype)
    elif q.spec.num_bits == 8:
        codes.view(torch.uint8)[places] = torch.randint(0x7F, (count,), generator=rng).byte()
    else:
        codes[places] = codes[places.roll(1)]
    return q._replace(codes=codes.view_as(q.codes))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_hundredth_of_the_codes_is_told_and_rounding_is_not(name: str, weight: Tensor) -> None:
    q = rtn_quantize(weight, scheme_from_name(name, SCHEMES[name]).weights, torch.float32)
    right = deviation(q, q.dequantize(), weight)
    assert right.strays == 0 and right.explained
    bad = damaged(q, weight.numel() // 100)
    wrong = deviation(bad, bad.dequantize(), weight)
    assert not wrong.explained
    row, column = wrong.first
    assert bad.codes[row, column].float() != q.codes[row, column].float()


def test_a_scale_of_another_group_is_told(weight: Tensor) -> None:
    """In 2 bits, too, where no single code is too far off."""
    q = rtn_quantize(weight, scheme_from_name("W2A16", 32).weights, torch.float32)
    scale = q.scale.clone()
    scale[3, 4] *= 8
    bad = q._replace(scale=scale)
    told = deviation(bad, bad.dequantize(), weight)
    assert (told.strays, told.first, told.explained) == (32, (3, 128), False)


def test_blocks_are_told_without_their_scales(weight: Tensor) -> None:
    q = rtn_quantize(weight, scheme_from_name("W4A16", 32).weights, torch.float32)
    assert blockwise(q.dequantize(), weight, 4.5, 32).explained
    assert not blockwise(damaged(q, 1300).dequantize(), weight, 4.5, 32).explained
