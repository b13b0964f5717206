"""The GPU kernels of packed whole-number weights: layout twins, every form in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.linear_ops import LinearOperands, LinearProblem, linear_reference
from lowbit.kernels.linear_wna16 import WNA16, pack_wna16
from lowbit.kernels.triton_ops.tiles import GemmConfig
from lowbit.kernels.triton_ops.wna16_gemm import wna16_dequantize, wna16_gemm
from lowbit.kernels.wna16_forms import BLOCK_N, pinned_config, wna16_config
from lowbit.kernels.wna16_layout import (
    WNA16Format,
    pack_scales,
    pack_words,
    tile_columns,
    unpack_scales,
    unpack_words,
)

from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")
CONFIG = GemmConfig(16, BLOCK_N, 3, 4, 2)


def problem(**changes) -> LinearProblem:
    return LinearProblem(4, 64, True, 128, 48, torch.float16, "cuda")._replace(**changes)


def format_of(p: LinearProblem) -> WNA16Format:
    group = 0 if p.group_size >= p.in_features else p.group_size
    return WNA16Format(p.num_bits, group, not p.symmetric)


def weight(p: LinearProblem, device, seed: int = 0) -> LinearOperands:
    g = torch.Generator().manual_seed(seed)
    half, groups = 1 << (p.num_bits - 1), -(-p.in_features // p.group_size)
    shape = (p.out_features, p.in_features)
    codes = torch.randint(-half, half, shape, generator=g, dtype=torch.int8)
    scale = ((torch.rand(p.out_features, groups, generator=g) + 0.5) * 0.01).to(torch.bfloat16)
    zero = None
    if not p.symmetric:
        zero = torch.randint(-half, half, scale.shape, generator=g, dtype=torch.int8).to(device)
    return LinearOperands(codes.to(device), scale.to(device), zero)


def inputs(p: LinearProblem, rows: int, device, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, p.in_features, generator=g).to(device, p.dtype)


def exactly(x, operands: LinearOperands, bias, p: LinearProblem) -> torch.Tensor:
    bias = None if bias is None else bias.double()
    return linear_reference(x.double(), operands, bias, p)


def assert_close(y: torch.Tensor, want: torch.Tensor) -> None:
    """Half an ulp of the output's dtype for the store, and as much for float32 sums."""
    ulp = torch.finfo(y.dtype).eps
    error = (y.double() - want).abs().max()
    assert error < ulp * want.abs().max(), f"largest error {error} of {want.abs().max()}"


@settings(deadline=None, max_examples=40)
@given(bits=st.sampled_from([2, 3, 4, 8]), rows=st.integers(1, 5), columns=st.integers(1, 600))
def test_words_round_trip(bits, rows, columns):
    g = torch.Generator().manual_seed(columns)
    unsigned = torch.randint(0, 1 << bits, (rows, columns), generator=g, dtype=torch.uint8)
    words = pack_words(unsigned, bits)
    columns_held = len(words) * tile_columns(bits)
    assert words.numel() * 16 == rows * columns_held * bits and columns_held >= columns
    assert torch.equal(unpack_words(words, bits, columns), unsigned)


def test_hand_written_words():
    """4 bits: word i holds columns i, 32 + i, 64 + i, 96 + i. 3 bits: two planes of low bits, then
    one in which word i holds the high bit of columns i, 32 + i, ..., 480 + i."""
    codes = torch.zeros(1, 128, dtype=torch.uint8)
    codes[0, [5, 37, 69, 101]] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    words = pack_words(codes, 4)
    assert words.shape == (1, 1, 1, 32) and words[0, 0, 0, 5] == 0x4321
    assert words.count_nonzero() == 1
    codes = torch.zeros(1, 512, dtype=torch.uint8)
    codes[0, [0, 64, 256]] = torch.tensor([3, 7, 5], dtype=torch.uint8)
    assert pack_words(codes, 3)[0, :, 0, 0].tolist() == [3 | 3 << 4, 1, 1 << 2 | 1 << 8]


@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
def test_scales_round_trip(asymmetric):
    g = torch.Generator().manual_seed(0)
    scale = torch.rand(7, 5, generator=g)
    zero = torch.randint(0, 256, (7, 5), generator=g, dtype=torch.uint8) if asymmetric else None
    for dtype in (torch.float16, torch.bfloat16):
        stored = scale.to(dtype).float()
        again, zeros = unpack_scales(pack_scales(stored, zero), asymmetric)
        assert torch.equal(again, stored)
        assert zeros is None if zero is None else torch.equal(zeros, zero)
    again, _ = unpack_scales(pack_scales(scale, zero), asymmetric)
    assert ((again - scale).abs() <= scale * 2**-16).all()


SHAPES = [(1, 128, 64), (3, 200, 48), (17, 576, 70)]


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [32, 64, 128, "channel"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gemm_is_the_reference(kernel_device, kernel_dtypes, bits, group, symmetric):
    for dtype in kernel_dtypes:
        for seed, (rows, columns, out) in enumerate(SHAPES):
            size = columns if group == "channel" else min(group, columns)
            p = problem(num_bits=bits, group_size=size, symmetric=symmetric, dtype=dtype,
                        in_features=columns, out_features=out)  # fmt: skip
            operands = weight(p, kernel_device, seed)
            x = inputs(p, rows, kernel_device)
            bias = inputs(p._replace(in_features=out), 1, kernel_device)[0] if seed % 2 else None
            packed = pack_wna16(operands, p)
            y = wna16_gemm(x, packed, bias, format_of(p), CONFIG)
            assert y.dtype == dtype
            assert_close(y, exactly(x, operands, bias, p))
            assert not packed.locks.any(), "locks must be free again"


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_dequantized_rows_are_the_reference_exactly(kernel_device, kernel_dtypes, bits, symmetric):
    for dtype in kernel_dtypes:
        p = problem(num_bits=bits, symmetric=symmetric, dtype=dtype, in_features=200)
        operands = weight(p, kernel_device)
        w = linear_reference(torch.eye(200, device=kernel_device).double(), operands, None, p).T
        rows = wna16_dequantize(pack_wna16(operands, p), 200, format_of(p), dtype, 5, 40)
        assert torch.equal(rows, w[5:40].to(dtype))


@pytest.mark.parametrize("rows", [0, 1, 40, 130])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "pinned"])
def test_the_linear_kernel_runs_each_form(kernel_device, rows, batch_invariant):
    p = problem(in_features=256, out_features=96, batch_invariant=batch_invariant)
    operands = weight(p, kernel_device)
    bias = inputs(p._replace(in_features=96), 1, kernel_device)[0]
    x = inputs(p, rows, kernel_device).view(rows, 1, 256)
    y = WNA16.run(x, WNA16.pack(operands, p), bias, p)
    assert y.shape == (rows, 1, 96)
    if rows:
        want = exactly(x, operands, bias, p)
        assert (y.double() - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("form", ["small", "tiled", "pinned"])
def test_a_row_has_the_same_bits_in_every_batch(kernel_device, form):
    p = problem(in_features=1024, out_features=80, group_size=128)
    packed = pack_wna16(weight(p, kernel_device), p)
    shape = 80, len(packed.words), 4, 90
    config = {"small": wna16_config(3, *shape), "tiled": wna16_config(20, *shape),
              "pinned": pinned_config(*shape)}[form]  # fmt: skip
    assert config.split_k > 1
    x = inputs(p, 20, kernel_device)
    whole = wna16_gemm(x, packed, None, format_of(p), config)
    for rows in (slice(0, 1), slice(15, 18)):
        some = wna16_gemm(x[rows], packed, None, format_of(p), config)
        assert torch.equal(some, whole[rows])


def test_parts_of_k_do_not_depend_on_the_batch():
    for out, tiles, arch in ((4096, 32, 80), (1024, 32, 90), (28672, 64, 100), (64, 1, "gfx942")):
        for rows in ((1, 16), (17, 128)):
            splits = {wna16_config(r, out, tiles, 4, arch).split_k for r in range(*rows)}
            assert len(splits) == 1


def test_rows_at_a_stride_and_every_output_written(kernel_device):
    p = problem(in_features=256, out_features=72)
    operands = weight(p, kernel_device)
    wide = inputs(p._replace(in_features=600), 5, kernel_device)
    x = wide[:, 100:356]
    y = wna16_gemm(x, pack_wna16(operands, p), None, format_of(p), CONFIG)
    assert not y.isnan().any()
    assert_close(y, exactly(x, operands, None, p))


def test_rows_beyond_two_billion_elements(kernel_device):
    p = problem(in_features=128)
    x = far_apart(inputs(p, 3, kernel_device))
    operands = weight(p, kernel_device)
    y = wna16_gemm(x, pack_wna16(operands, p), None, format_of(p), CONFIG)
    assert_close(y, exactly(x, operands, None, p))


def test_wrong_tensors_are_named(kernel_device):
    p = problem()
    packed = pack_wna16(weight(p, kernel_device), p)
    x, fmt = inputs(p, 2, kernel_device), format_of(p)

    def refused(message: str, x=x, bias=None, fmt=fmt, **parts) -> None:
        with pytest.raises(ValueError, match=message):
            wna16_gemm(x, packed._replace(**parts), bias, fmt, CONFIG)

    refused(r"x has shape \(2, 2, 64\)", x=x.view(2, 2, 64))
    refused("x is float32, not float16 or bfloat16", x=x.float())
    refused("the last axis of x must be contiguous", x=inputs(p, 128, kernel_device).T)
    refused(r"words has shape \(1, 1, 48, 32\), not \(2, 1, 48, 32\)", x=torch.cat([x, x], 1))
    refused("words is int32, not int16", words=packed.words.int())
    refused(r"scale has shape \(2, 47\), not \(2, 48\)", scale=packed.scale[:, :47].contiguous())
    refused(r"scale has shape \(2, 48\), not \(4, 48\)", fmt=fmt._replace(group_size=32))
    refused("takes groups of a multiple of 32 columns, not 48", fmt=fmt._replace(group_size=48))
    refused("groups must divide 128 columns or be a multiple", fmt=fmt._replace(group_size=96))
    refused(r"bias has shape \(47,\), not \(48\)", bias=x[0, :47])
    refused("bias is float32, not float16", bias=x[0, :48].float())
    with pytest.raises(ValueError, match="rows 40 to 60 of a weight with 48"):
        wna16_dequantize(packed, 128, fmt, torch.float16, 40, 60)
