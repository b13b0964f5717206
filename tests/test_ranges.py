"""choose_qparams, quantize and dequantize: error bounds, exact zeros, and that searching pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.affine import expand_groups, quantize_affine
from lowbit.kernels.errors import UserError
from lowbit.quantize.quantized import Quantized, elements
from lowbit.quantize.ranges import choose_qparams, uniform_importance
from lowbit.quantize.spec import PRESETS, Block, Channel, Group, QuantSpec, TensorWise
from torch import Tensor

ROWS, COLUMNS = 12, 64
GRANULARITIES = [
    TensorWise(), Channel(), Group(8), Group(16), Group(32), Block(5, 24), Block(4, 16),
    Block(99, 99),
]  # fmt: skip
INTEGERS = st.builds(
    QuantSpec,
    num_bits=st.integers(2, 8),
    granularity=st.sampled_from(GRANULARITIES),
    symmetric=st.booleans(),
)
FLOATS = st.builds(
    QuantSpec,
    num_bits=st.sampled_from([4, 8]),
    type=st.just("float"),
    granularity=st.sampled_from(GRANULARITIES),
)
MICRO = st.sampled_from([PRESETS[n].weights for n in ("NVFP4A16", "MXFP4A16", "MXFP8A16")])
SPECS = st.one_of(INTEGERS, FLOATS, MICRO)
SPREADS = st.sampled_from([1e-30, 1e-4, 1.0, 1e4, 1e30])


def weight(seed: int, rows: int = ROWS, columns: int = COLUMNS, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * spread


def quantized(
    w: Tensor, spec: QuantSpec, h: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Quantized:
    p = choose_qparams(w, spec, dtype, h)
    codes = quantize_affine(w, p.float_scale(), p.zero_point, elements(spec), spec.block)
    return Quantized(codes, p.scale, p.zero_point, spec, p.global_scale)


def importance(seed: int) -> Tensor:
    return torch.rand(COLUMNS, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-3


@settings(max_examples=120, deadline=None)
@given(SPECS, st.integers(0, 10_000), SPREADS)
def test_error_is_at_most_half_a_step_inside_the_range(
    spec: QuantSpec, seed: int, spread: float
) -> None:
    """Half of what lies between the two elements about a value: for floats that grows with it."""
    w = weight(seed, spread=spread)
    q = quantized(w, spec)
    assert q.scale.shape == spec.scale_shape(*w.shape) and q.codes.shape == w.shape
    step = expand_groups(q.float_scale(), *w.shape, spec.block)
    error = (q.dequantize() - w).abs()
    if q.zero_point is not None:  # the range covers every value; its zero-point was rounded too
        assert (error <= step * 1.0001).all()
        return
    codes = elements(spec)
    inside = (w / step <= codes.highest) & (w / step >= codes.lowest)
    assert inside.float().mean() > 0.4
    if spec.type == "int":
        half = step * 0.5
    else:
        mantissa, smallest = (3, 2.0**-9) if spec.num_bits == 8 else (1, 0.5)
        half = torch.maximum(w.abs() * 2.0 ** -(mantissa + 1), step * smallest / 2)
    assert (error <= half * 1.0001)[inside].all()


@settings(max_examples=80, deadline=None)
@given(SPECS, st.integers(0, 10_000), st.booleans())
def test_zero_stays_zero(spec: QuantSpec, seed: int, search: bool) -> None:
    w = weight(seed)
    w[:, ::3] = 0
    q = quantized(w, spec, importance(seed) if search else None)
    assert (q.dequantize()[:, ::3] == 0).all()


@settings(max_examples=80, deadline=None)
@given(SPECS, st.booleans())
def test_constant_and_all_zero_groups(spec: QuantSpec, search: bool) -> None:
    w = torch.zeros(ROWS, COLUMNS)
    w[4:8] = 0.7
    w[8:] = -0.3
    for part in (w, w[4:8], w[8:]):
        got = quantized(part, spec, torch.ones(COLUMNS) if search else None).dequantize()
        assert torch.isfinite(got).all()
        assert (got[part == 0] == 0).all()
        if len(part) < ROWS:  # a constant alone: off by the scale's rounding, or cut at the end
            off = 0.35 if spec.num_bits == 2 and spec.symmetric else 0.2
            assert torch.allclose(got, part, rtol=off)
    assert (quantized(torch.zeros(ROWS, COLUMNS), spec).dequantize() == 0).all()


@settings(max_examples=60, deadline=None)
@given(SPECS, st.sampled_from([1e-38, 1e-40, 1e-44]), st.booleans())
def test_subnormal_weights_end_in_finite_values(
    spec: QuantSpec, spread: float, search: bool
) -> None:
    w = weight(1, spread=spread)
    got = quantized(w, spec, torch.ones(COLUMNS) if search else None).dequantize()
    assert torch.isfinite(got).all()
    assert (got.abs() <= 1e-36).all()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("scheme", ["W4A16", "FP8", "FP8_BLOCK", "NVFP4", "MXFP8"])
def test_what_is_not_finite_is_refused(scheme: str, bad: float) -> None:
    w = weight(0, columns=128)
    w[3, 5] = bad
    with pytest.raises(UserError, match="NaN or infinite"):
        choose_qparams(w, PRESETS[scheme].weights, torch.float32)


@settings(max_examples=80, deadline=None)
@given(SPECS, st.integers(0, 10_000))
def test_search_is_never_worse_than_the_plain_range(spec: QuantSpec, seed: int) -> None:
    w = weight(seed)
    h = importance(seed + 1)
    error = lambda q: ((q.dequantize() - w).square() * h).sum()  # noqa: E731
    assert error(quantized(w, spec, h)) <= error(quantized(w, spec)) * 1.0001


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.booleans(), st.integers(0, 10_000))
def test_search_beats_the_plain_range_at_few_bits(bits: int, symmetric: bool, seed: int) -> None:
    spec = QuantSpec(bits, granularity=Group(32), symmetric=symmetric)
    w, h = weight(seed), importance(seed + 1)
    error = lambda q: ((q.dequantize() - w).square() * h).sum()  # noqa: E731
    assert error(quantized(w, spec, h)) < error(quantized(w, spec))


def test_uniform_importance_searches_plain_squared_error() -> None:
    w, spec = weight(3), PRESETS["NVFP4"].weights
    error = lambda q: (q.dequantize() - w).square().sum()  # noqa: E731
    assert error(quantized(w, spec, uniform_importance(w))) < 0.97 * error(quantized(w, spec))


def test_symmetric_search_may_turn_the_scale_round() -> None:
    # the largest value is positive: code -8 reaches it only with a negative scale
    w = torch.cat([torch.full((1, 1), 8.0), torch.linspace(-6, 6, 31)[None]], dim=1)
    spec = QuantSpec(4, granularity=Group(32))
    assert choose_qparams(w, spec, torch.float32, torch.ones(32)).scale.item() < 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_storable(dtype: torch.dtype) -> None:
    w = torch.cat([weight(0) * 1e-9, weight(1) * 1e9])
    for spec in (QuantSpec(4, granularity=Group(16)), PRESETS["FP8_DYNAMIC"].weights):
        scale = choose_qparams(w, spec, dtype, torch.ones(COLUMNS)).scale
        assert scale.dtype == dtype
        assert torch.isfinite(scale).all() and (scale != 0).all()


@pytest.mark.parametrize("search", [False, True], ids=["plain", "search"])
def test_coarse_scales_are_as_their_formats_have_them(search: bool) -> None:
    w = weight(5)
    w[2] = 0
    h = torch.ones(COLUMNS) if search else None
    nv = quantized(w, PRESETS["NVFP4"].weights, h)
    assert nv.scale.dtype == torch.float8_e4m3fn and nv.global_scale is not None
    assert nv.global_scale.item() == pytest.approx(448 * 6 / w.abs().max().item())
    assert nv.scale.float().max() > 224  # most of E4M3's range is used
    mx = quantized(w, PRESETS["MXFP4"].weights, h)
    assert mx.scale.dtype == torch.uint8 and mx.global_scale is None
    assert torch.equal(mx.float_scale().log2(), mx.float_scale().log2().round())


def test_a_part_of_a_weight_under_the_scale_of_the_whole() -> None:
    """Linears that share an input are solved at once: their NVFP4 global scale is one."""
    from lowbit.quantize.ranges import scale_store

    spec = replace(PRESETS["NVFP4"].weights)
    stacked = torch.cat([weight(1), weight(2) * 9])
    store = scale_store(stacked, spec, torch.bfloat16)
    part = choose_qparams(stacked[:ROWS], spec, torch.bfloat16, store=store)
    whole = choose_qparams(stacked, spec, torch.bfloat16)
    assert torch.equal(part.scale.float(), whole.scale[:ROWS].float())
    assert part.global_scale is not None and torch.equal(part.global_scale, whole.global_scale)


def test_an_octave_of_scales_is_worth_a_tenth_of_a_channels_fp8_error() -> None:
    w, spec = weight(6, rows=64, columns=512), PRESETS["FP8_DYNAMIC"].weights
    plain, searched = (
        (quantized(w, spec, h).dequantize() - w).square().sum() for h in (None, torch.ones(512))
    )
    assert searched < 0.9 * plain
