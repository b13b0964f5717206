"""Errors that a scheme explains are told from damaged codes, in every scheme."""

from __future__ import annotations

import pytest
import torch
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.spec import scheme_from_name
from lowbit.quantize.verification.deviations import (
    FEW,
    Deviation,
    blockwise,
    deviation,
    rounded_apart,
)
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


def spoiled(q: Quantized, where: tuple[slice | int, slice | int]) -> Quantized:
    """Any codes in place of those."""
    codes, end = q.codes.clone(), 1 << (q.spec.num_bits - 1)
    shape = codes[where].shape
    codes[where] = torch.randint(-end, end, shape, generator=generator()).to(codes.dtype)
    return q._replace(codes=codes)


def test_what_gptq_leaves_in_a_row_and_some_columns_is_no_damage(weight: Tensor) -> None:
    """And damage beside it is told: codes anywhere, and a stretch of a file, in rows or columns."""
    q = rtn_quantize(weight, scheme_from_name("W4A16", 32).weights, torch.float32)
    for where in ((7, slice(None)), (slice(None), 40), (slice(None), 333)):
        q = spoiled(q, where)
    assert deviation(q, q.dequantize(), weight).strays == 0
    stretches = ((slice(20, 26), slice(None)), (slice(None), slice(100, 116)))
    for bad in (damaged(q, weight.numel() // 100), *(spoiled(q, s) for s in stretches)):
        told = deviation(bad, bad.dequantize(), weight)
        assert not told.explained
        assert told.first[0] != 7 and told.first[1] not in (40, 333)


@pytest.mark.parametrize("name", ["W2A16", *SCHEMES])
def test_one_code_that_is_not_the_nearest_is_told_among_rounded_ones(
    name: str, weight: Tensor
) -> None:
    q = rtn_quantize(weight, scheme_from_name(name, SCHEMES.get(name, 32)).weights, torch.float32)
    right = deviation(q, q.dequantize(), weight)
    assert right.misplaced == 0
    codes = q.codes.clone()
    far = codes[3, 5].float() > 0  # then its lowest neighbour's is another one
    codes[3, 5] = codes.float().min() if far else codes.float().max()
    bad = q._replace(codes=codes)
    told = deviation(bad, bad.dequantize(), weight)
    assert (told.misplaced, told.astray) == (1, (3, 5))
    linears = {f"{i}": right for i in range(FEW)} | {"damaged": told}
    assert rounded_apart(linears) == {"damaged": told}
    half = Deviation(0.1, 1000, misplaced=100)
    assert rounded_apart({f"{i}": half for i in range(9)} | linears) == {}
