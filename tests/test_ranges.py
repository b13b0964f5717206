"""choose_qparams, quantize and dequantize: error bounds, exact zeros, and that searching pays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.affine import code_range, dequantize_affine, expand_groups, quantize_affine
from lowbit.quantize.ranges import choose_qparams
from lowbit.quantize.spec import Channel, Group, QuantSpec

SPECS = st.builds(
    QuantSpec,
    num_bits=st.integers(2, 8),
    granularity=st.sampled_from([Channel(), Group(8), Group(16), Group(32)]),
    symmetric=st.booleans(),
)


def weight(seed: int, rows: int = 6, columns: int = 32, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * spread


def rounded(w: torch.Tensor, spec: QuantSpec, h: torch.Tensor | None = None) -> torch.Tensor:
    scale, zero = choose_qparams(w, spec, torch.float32, h)
    return dequantize_affine(quantize_affine(w, scale, zero, spec.num_bits), scale, zero)


@settings(max_examples=60, deadline=None)
@given(SPECS, st.integers(0, 10_000), st.sampled_from([1e-4, 1.0, 1e4]))
def test_error_is_at_most_half_a_step_inside_the_range(
    spec: QuantSpec, seed: int, spread: float
) -> None:
    w = weight(seed, spread=spread)
    scale, zero = choose_qparams(w, spec, torch.float32)
    step = expand_groups(scale, w.shape[1])
    error = (rounded(w, spec) - w).abs()
    if zero is None:
        qmin, qmax = code_range(spec.num_bits)
        inside = (w / step <= qmax) & (w / step >= qmin)
        assert inside.float().mean() > 0.4
        assert (error <= step * 0.5001)[inside].all()
    else:  # an asymmetric range covers every value; its zero-point was rounded too
        assert (error <= step * 1.0001).all()


@settings(max_examples=40, deadline=None)
@given(SPECS, st.integers(0, 10_000), st.booleans())
def test_zero_stays_zero(spec: QuantSpec, seed: int, search: bool) -> None:
    w = weight(seed)
    w[:, ::3] = 0
    h = torch.rand(32, generator=torch.Generator().manual_seed(seed)) if search else None
    assert (rounded(w, spec, h)[:, ::3] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("search", [True, False])
def test_constant_and_empty_groups(symmetric: bool, search: bool) -> None:
    spec = QuantSpec(4, granularity=Group(16), symmetric=symmetric)
    w = torch.zeros(3, 32)
    w[1] = 0.7
    w[2] = -0.3
    got = rounded(w, spec, torch.ones(32) if search else None)
    assert torch.isfinite(got).all()
    assert (got[0] == 0).all()
    assert torch.allclose(got[1:], w[1:], rtol=0.07)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.booleans(), st.integers(0, 10_000))
def test_search_beats_the_plain_range_on_weighted_error(
    num_bits: int, symmetric: bool, seed: int
) -> None:
    spec = QuantSpec(num_bits, granularity=Group(32), symmetric=symmetric)
    w = weight(seed, rows=16, columns=64)
    h = torch.rand(64, generator=torch.Generator().manual_seed(seed + 1)) ** 4 + 1e-3
    error = lambda got: ((got - w).square() * h).sum()  # noqa: E731
    assert error(rounded(w, spec, h)) < error(rounded(w, spec))


def test_symmetric_search_may_turn_the_scale_round() -> None:
    # the largest value is positive: code -8 reaches it only with a negative scale
    w = torch.cat([torch.full((1, 1), 8.0), torch.linspace(-6, 6, 31)[None]], dim=1)
    scale, _ = choose_qparams(w, QuantSpec(4, granularity=Group(32)), torch.float32, torch.ones(32))
    assert scale.item() < 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_storable(dtype: torch.dtype) -> None:
    w = torch.cat([weight(0) * 1e-9, weight(1) * 1e9])
    scale, _ = choose_qparams(w, QuantSpec(4, granularity=Group(16)), dtype, torch.ones(32))
    assert scale.dtype == dtype
    assert torch.isfinite(scale).all() and (scale != 0).all()
