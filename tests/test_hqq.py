"""HQQ's claims: without data, less weight error than the plain range, in whole zero-points."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.quantize.passes.hqq import hqq_quantize
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.passes.settings import HQQSettings
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.spec import Block, Channel, Group, QuantSpec
from torch import Tensor


@pytest.fixture(scope="module")
def weight() -> Tensor:
    """Weights [64, 256] with the heavy tails and the shifted rows of trained ones."""
    g = torch.Generator().manual_seed(0)
    normal, chi = torch.randn(64, 256, generator=g), torch.randn(4, 64, 256, generator=g)
    shift = 0.3 * torch.randn(64, 1, generator=g)
    return 0.02 * (normal / chi.square().mean(0).sqrt() + shift)  # Student's t, 4 degrees


def errors(w: Tensor, q: Quantized, p: float) -> float:
    return (w - q.dequantize()).abs().pow(p).mean().item()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("granularity", [Group(64), Channel()], ids=["g64", "channel"])
@pytest.mark.parametrize("num_bits", [2, 3, 4])
@pytest.mark.parametrize("norm", [0.7, 1.0])
def test_less_error_than_the_plain_range(weight, symmetric, granularity, num_bits, norm) -> None:
    spec = QuantSpec(num_bits, granularity=granularity, symmetric=symmetric)
    rtn = rtn_quantize(weight, spec, torch.float16)
    hqq = hqq_quantize(weight, spec, torch.float16, HQQSettings(norm))
    for p in (norm, 2.0):  # what it minimizes, and what a linear's output feels
        assert errors(weight, hqq, p) < errors(weight, rtn, p)


@pytest.mark.parametrize("num_bits", [2, 4])
def test_zero_points_are_codes_and_codes_in_range(weight, num_bits: int) -> None:
    q = hqq_quantize(weight, QuantSpec(num_bits, symmetric=False), torch.bfloat16, HQQSettings())
    low, high = -(1 << num_bits - 1), (1 << num_bits - 1) - 1
    assert q.zero_point is not None and q.zero_point.dtype == torch.int8
    assert q.scale.dtype == torch.bfloat16
    for codes in (q.codes, q.zero_point):
        assert low <= codes.min() and codes.max() <= high


def test_smaller_norms_give_up_outliers(weight) -> None:
    w = weight.clone()
    w[:, ::64] = 0.3  # one weight of each group, far beyond the others
    spec = QuantSpec(3, granularity=Group(64))
    outlier, rest = torch.arange(256) % 64 == 0, torch.arange(256) % 64 != 0
    sharp, mild = (hqq_quantize(w, spec, torch.float16, HQQSettings(p)) for p in (0.3, 1.0))
    off = [(w - q.dequantize()).abs() for q in (sharp, mild)]
    assert off[0][:, outlier].mean() > off[1][:, outlier].mean()
    assert off[0][:, rest].mean() < off[1][:, rest].mean()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_groups_of_one_value(symmetric: bool, value: float) -> None:
    w = torch.full((2, 32), value)
    spec = QuantSpec(4, granularity=Group(16), symmetric=symmetric)
    q = hqq_quantize(w, spec, torch.float16, HQQSettings())
    assert torch.isfinite(q.scale).all() and (q.scale != 0).all()
    assert torch.allclose(q.dequantize(), w, atol=0.002)


def test_rows_do_not_interact_and_the_weight_stays(weight) -> None:
    before, spec = weight.clone(), QuantSpec(3, granularity=Group(32), symmetric=False)
    whole = hqq_quantize(weight, spec, torch.float16, HQQSettings())
    part = hqq_quantize(weight[8:16], spec, torch.float16, HQQSettings())
    assert torch.equal(whole.codes[8:16], part.codes) and torch.equal(whole.scale[8:16], part.scale)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    "spec", [QuantSpec(4, "float", Group(16)), QuantSpec(4, "int", Block(8, 8))]
)
def test_other_formats_are_refused(weight, spec: QuantSpec) -> None:
    with pytest.raises(UserError, match="hqq"):
        hqq_quantize(weight, spec, torch.float16, HQQSettings())


def test_non_finite_weights_are_refused(weight) -> None:
    with pytest.raises(UserError, match="NaN"):
        hqq_quantize(weight / 0, QuantSpec(4), torch.float16, HQQSettings())


@pytest.mark.parametrize("settings", [{"norm": 0.0}, {"norm": 1.5}, {"iterations": 0}])
def test_impossible_settings_fail_at_construction(settings) -> None:
    with pytest.raises(UserError):
        HQQSettings(**settings)
