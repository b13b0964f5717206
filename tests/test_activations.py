"""Quantized activations: equal to compressed-tensors' own, and what their definition promises."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.activations import quantize_activation
from lowbit.kernels.errors import UserError
from lowbit.quantize.activations import (
    activation_format,
    fake_quantize_input,
    input_scale_of_peak,
)
from lowbit.quantize.checkpoint.ct_config import spec_to_args
from lowbit.quantize.spec import PRESETS, Group, QuantSpec, TensorWise, Token

QUANTIZING = {name: s.input_activations for name, s in PRESETS.items() if s.input_activations}


def inputs(seed: int = 0, rows: int = 6, columns: int = 256) -> torch.Tensor:
    """Three sequences with outlier channels, a token of zeros and one that is tiny."""
    x = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(seed))
    x[..., ::37] *= 30
    x[0, 1] = 0
    x[1, 2] *= 1e-30
    x[2, 3, :40] = 0
    return x


def scale_for(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor | None:
    return input_scale_of_peak(x.abs().amax(), spec)


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_compressed_tensors(scheme: str, seed: int) -> None:
    ct = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    spec, x = QUANTIZING[scheme], inputs(seed)
    args = ct.QuantizationArgs(**spec_to_args(spec))
    scale = scale_for(x, spec)
    module = SimpleNamespace(quantization_status=ct.QuantizationStatus.FROZEN)
    if scale is not None:
        setattr(module, "input_scale" if not spec.dynamic else "input_global_scale", scale)
    want = forward.forward_quantize(module, x, "input", args)
    assert torch.equal(fake_quantize_input(x, spec, scale), want)


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_in_bfloat16_the_float32_values_are_rounded_once(scheme: str) -> None:
    spec, x = QUANTIZING[scheme], inputs().bfloat16()
    scale = scale_for(x, spec)
    got = fake_quantize_input(x, spec, scale)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, fake_quantize_input(x.float(), spec, scale).bfloat16())


SPECS = st.one_of(
    st.sampled_from(list(QUANTIZING.values())),
    st.builds(
        QuantSpec,
        num_bits=st.integers(4, 8),
        granularity=st.one_of(st.just(Token()), st.builds(Group, st.integers(1, 40))),
        dynamic=st.just(True),
    ),
)


@settings(max_examples=80, deadline=None)
@given(SPECS, st.integers(1, 70), st.integers(0, 9999), st.sampled_from([1e-20, 1.0, 1e20]))
def test_values_and_error_bounds(spec: QuantSpec, columns: int, seed: int, spread: float) -> None:
    """Any width (the last group may be cut): values are elements times scales, zero is zero, and
    the error is at most half a step (whole numbers) or a sixteenth or a quarter (floats)."""
    x = inputs(seed, 4, columns) * spread
    fmt, scale = activation_format(spec), scale_for(x, spec)
    codes, scales = quantize_activation(x, fmt, scale)
    got = fake_quantize_input(x, spec, scale)
    assert got.shape == x.shape and torch.isfinite(got).all()
    assert (got[x == 0] == 0).all()
    assert torch.equal(codes, fmt.elements.snap_(codes.clone()))
    size = spec.granularity.size if isinstance(spec.granularity, Group) else columns
    step = scales.expand(*x.shape[:-1], -(-columns // size)) if fmt.static else scales
    step = step.repeat_interleave(size, -1)[..., :columns]
    assert torch.equal(got, codes * step)
    inside = (x / step).abs() <= fmt.elements.highest
    share = {"int": torch.zeros(()), "float": x.abs() * (2**-4 if spec.num_bits == 8 else 2**-2)}
    lowest = 0.5 if spec.type == "int" else 2**-10 if spec.num_bits == 8 else 0.25
    assert ((got - x).abs() <= torch.maximum(share[spec.type], step * lowest) * 1.0001)[
        inside
    ].all()


def test_a_token_does_not_depend_on_its_batch() -> None:
    x = inputs()
    for spec in QUANTIZING.values():
        scale = scale_for(x, spec)
        whole = fake_quantize_input(x, spec, scale)
        assert torch.equal(fake_quantize_input(x[1, 4:5], spec, scale), whole[1, 4:5])


def test_a_static_scale_puts_the_peak_at_the_end_of_the_range() -> None:
    int8 = QuantSpec(8, granularity=TensorWise())
    float8 = QuantSpec(8, "float", TensorWise())
    assert input_scale_of_peak(torch.tensor(255.0), int8).item() == 2.0
    assert input_scale_of_peak(torch.tensor(896.0), float8).item() == 2.0
    stored = input_scale_of_peak(torch.tensor(3.0), int8, torch.bfloat16)
    assert stored.dtype == torch.bfloat16 and stored.shape == (1,)
    assert input_scale_of_peak(torch.tensor(0.0), int8).item() == 1.0
    assert input_scale_of_peak(torch.tensor(1e-9), int8, torch.float16).item() > 0


def test_nvfp4_reaches_the_largest_local_scale() -> None:
    spec = QUANTIZING["NVFP4"]
    x = inputs()
    scale = input_scale_of_peak(x.abs().amax(), spec)
    assert scale is not None and scale.dtype == torch.float32
    assert scale.item() == pytest.approx(448 * 6 / x.abs().amax().item())
    _, scales = quantize_activation(x, activation_format(spec), scale)
    assert (scales * scale).amax().item() == pytest.approx(448)


def test_only_static_and_nvfp4_activations_store_a_scale() -> None:
    stored = {
        n for n, s in QUANTIZING.items() if input_scale_of_peak(torch.ones(()), s) is not None
    }
    assert stored == {"W8A8_STATIC", "FP8", "NVFP4"}


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (QuantSpec(8, granularity=TensorWise(), dynamic=True), "dynamic activation scales"),
        (QuantSpec(8, granularity=Group(32)), "static activation scales"),
        (QuantSpec(8, granularity=Token(), symmetric=False, dynamic=True), "zero-point"),
    ],
)
def test_what_is_not_computed_is_refused(spec: QuantSpec, named: str) -> None:
    with pytest.raises(UserError, match=named):
        fake_quantize_input(torch.ones(1, 32), spec)
