"""GPTQ's claims: less output error than rounding, act-order better than none, exact algebra."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lowbit.calib.statistics import Hessian, InputShift
from lowbit.kernels.errors import UserError
from lowbit.quantize.passes.gptq import (
    corrected_weight,
    factor_hessian,
    gptq_quantize,
    output_energy,
)
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.passes.settings import GPTQSettings
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.spec import Block, Channel, Group, QuantSpec

ROWS, COLUMNS = 48, 128


@pytest.fixture(scope="module")
def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the Hessian of correlated inputs of unequal size."""
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(COLUMNS, COLUMNS, generator=g) / COLUMNS**0.5
    x = torch.randn(2048, COLUMNS, generator=g) @ mix * torch.rand(COLUMNS, generator=g).pow(3)
    hessian = Hessian(COLUMNS)
    hessian.add(x)
    return torch.randn(ROWS, COLUMNS, generator=g), hessian.mean()


def output_error(w: torch.Tensor, h: torch.Tensor, q: Quantized) -> float:
    difference = w - q.dequantize()
    return ((difference @ h) * difference).sum().item()


def solve(w: torch.Tensor, h: torch.Tensor, spec: QuantSpec, settings: GPTQSettings) -> Quantized:
    return gptq_quantize(w, factor_hessian(h, settings), spec, torch.float16, settings).quantized


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("granularity", [Group(32), Channel()], ids=["g32", "channel"])
@pytest.mark.parametrize("act_order", ["static", "none", "desc_act"])
def test_beats_rounding_to_nearest(layer, num_bits, symmetric, granularity, act_order) -> None:
    w, h = layer
    spec = QuantSpec(num_bits, granularity=granularity, symmetric=symmetric)
    got = output_error(w, h, solve(w, h, spec, GPTQSettings(act_order=act_order)))
    assert got < 0.8 * output_error(w, h, rtn_quantize(w, spec, torch.float16))


FLOATS = {
    "nvfp4": QuantSpec(4, "float", Group(16), scale_dtype="e4m3"),
    "mxfp4": QuantSpec(4, "float", Group(32), scale_dtype="e8m0"),
    "fp8 channel": QuantSpec(8, "float", Channel()),
    "fp8 block": QuantSpec(8, "float", Block(32, 48)),
}


@pytest.mark.parametrize("spec", FLOATS.values(), ids=FLOATS)
def test_beats_rounding_to_nearest_in_float_formats(layer, spec: QuantSpec) -> None:
    w, h = layer
    solved = solve(w, h, spec, GPTQSettings())
    rounded = rtn_quantize(w, spec, torch.float16)
    assert solved.scale.shape == rounded.scale.shape == spec.scale_shape(ROWS, COLUMNS)
    assert output_error(w, h, solved) < 0.8 * output_error(w, h, rounded)


def test_correction_of_inputs_brings_outputs_nearer_to_the_float_models(layer) -> None:
    w, _ = layer
    g = torch.Generator().manual_seed(3)
    mix = torch.randn(COLUMNS, COLUMNS, generator=g) / COLUMNS**0.5
    f = torch.randn(2048, COLUMNS, generator=g) @ mix
    x = f + 0.3 * f.roll(1, 1) + 0.1 * torch.randn(2048, COLUMNS, generator=g)
    hessian, shift = Hessian(COLUMNS), InputShift(COLUMNS)
    hessian.add(x)
    shift.add_pair(x, f)
    assert torch.allclose(shift.mean(), (f - x).T @ x / 2048, atol=1e-4)
    factor = factor_hessian(hessian.mean(), GPTQSettings(dampening_frac=1e-4))
    spec = QuantSpec(4, granularity=Group(32))

    def error(strength: float) -> float:
        aim = corrected_weight(w, factor, shift.mean(), strength)
        q = gptq_quantize(aim, factor, spec, torch.float16, GPTQSettings()).quantized
        return (f @ w.T - x @ q.dequantize().T).square().mean().item()

    assert torch.equal(corrected_weight(w, factor, shift.mean(), 0.0), w)
    least = torch.linalg.lstsq(x, f @ w.T).solution.T
    assert torch.allclose(corrected_weight(w, factor, shift.mean(), 1.0), least, atol=2e-2)
    assert error(1.0) < 0.5 * error(0.5) < 0.5 * error(0.0)


def test_the_shift_of_bfloat16_inputs_is_summed_without_a_bias() -> None:
    g = torch.Generator().manual_seed(4)
    f = torch.randn(4096, COLUMNS, generator=g).bfloat16()
    x = (f + 0.05 * torch.randn(f.shape, generator=g)).bfloat16()
    shift = InputShift(COLUMNS)
    shift.add_pair(x, f)
    exact = (f.double() - x.double()).T @ x.double() / len(x)
    assert shift.mean().dtype == torch.float32
    assert (shift.mean() - exact).norm() < 1e-3 * exact.norm()
    assert abs((shift.mean() - exact).diagonal().mean() / exact.diagonal().mean()) < 1e-4


REFINED = {
    "w4": QuantSpec(4, granularity=Group(32)),
    "w2 asym": QuantSpec(2, granularity=Group(32), symmetric=False),
    "w3 channel": QuantSpec(3, granularity=Channel()),
    "nvfp4": FLOATS["nvfp4"],
    "fp8 channel": FLOATS["fp8 channel"],
}


@pytest.mark.parametrize("spec", REFINED.values(), ids=REFINED)
def test_every_round_of_refinement_lowers_the_error(layer, spec: QuantSpec) -> None:
    w, h = layer
    errors = []
    for rounds in (0, 1, 3):
        settings = GPTQSettings(refine_rounds=rounds)
        factor = factor_hessian(h, settings)
        result = gptq_quantize(w, factor, spec, torch.float16, settings)
        difference = w - result.quantized.dequantize()
        told = ((difference @ factor.damped()) * difference).sum(1)
        assert torch.allclose(result.error, told, rtol=1e-3, atol=1e-6)
        errors.append(result.error.sum().item())
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.98 * errors[0]


@pytest.mark.parametrize("num_bits", [3, 4])
def test_each_refinement_pays(layer, num_bits: int) -> None:
    w, h = layer
    spec = QuantSpec(num_bits, granularity=Group(32))
    error = lambda **kw: output_error(w, h, solve(w, h, spec, GPTQSettings(**kw)))  # noqa: E731
    assert error() < error(act_order="none")
    assert error() < error(scale_search="minmax")


def test_current_scales_follow_the_compensated_weights(layer) -> None:
    w, h = layer
    spec = QuantSpec(4, granularity=Group(32))
    settings = GPTQSettings(act_order="none", static_groups=False)
    moving = solve(w, h, spec, settings)
    fixed = solve(w, h, spec, replace(settings, static_groups=True))
    assert torch.equal(moving.scale[:, 0], fixed.scale[:, 0])  # nothing is compensated yet
    assert not torch.equal(moving.scale[:, 1:], fixed.scale[:, 1:])
    assert output_error(w, h, moving) < output_error(w, h, rtn_quantize(w, spec, torch.float16))


def test_follows_the_paper_column_by_column(layer) -> None:
    """The delayed, reordered, transposed form equals the plain loop of the paper."""
    w, h = layer
    spec = QuantSpec(4, granularity=Channel())
    settings = GPTQSettings(block_size=7, act_order="none")
    factor = factor_hessian(h, settings)
    quantized = gptq_quantize(w, factor, spec, torch.float32, settings).quantized
    damped = h.double() + 0.01 * h.double().diagonal().mean() * torch.eye(COLUMNS)
    u = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    work, scale = w.double().clone(), quantized.scale[:, 0].double()
    codes = torch.empty_like(quantized.codes)
    for j in range(COLUMNS):
        codes[:, j] = (work[:, j] / scale).round().clamp(-8, 7).to(torch.int8)
        error = (work[:, j] - codes[:, j] * scale) / u[j, j]
        work[:, j + 1 :] -= error[:, None] * u[j, j + 1 :]
    assert (codes != quantized.codes).float().mean() < 0.002  # float32 against float64: rare ties


def test_reported_error_is_the_damped_output_error(layer) -> None:
    w, h = layer
    settings = GPTQSettings()
    result = gptq_quantize(
        w, factor_hessian(h, settings), QuantSpec(4, granularity=Group(32)), torch.float16, settings
    )
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(COLUMNS)
    assert result.error.sum().item() == pytest.approx(
        output_error(w, damped, result.quantized), rel=1e-3
    )


@pytest.mark.parametrize("columns", [1, 5, COLUMNS])
def test_output_energy_is_the_mean_square_of_each_output(layer, columns: int) -> None:
    w, h = layer[0][:, :columns].double(), layer[1][:columns, :columns].double()
    energy = output_energy(w.float(), h.float())
    torch.testing.assert_close(energy.double(), ((w @ h) * w).sum(1), rtol=1e-5, atol=0)


def test_stacked_linears_get_what_each_gets_alone(layer) -> None:
    w, h = layer
    spec, settings = QuantSpec(4, granularity=Group(32)), GPTQSettings()
    together = solve(w, h, spec, settings)
    for part, rows in ((w[:16], slice(0, 16)), (w[16:], slice(16, None))):
        alone = solve(part, h, spec, settings)
        assert (alone.codes != together.codes[rows]).float().mean() < 0.002
        assert torch.equal(alone.scale, together.scale[rows])


def test_block_size_changes_nothing_but_float_order(layer) -> None:
    w, h = layer
    spec = QuantSpec(4, granularity=Group(32))
    one, other = (solve(w, h, spec, GPTQSettings(block_size=b)) for b in (1, 128))
    assert (one.codes != other.codes).float().mean() < 0.002


def test_dead_columns_are_rounded_and_counted(layer) -> None:
    w, h = layer
    h = h.clone()
    h[5], h[:, 5] = 0, 0
    settings = GPTQSettings()
    factor = factor_hessian(h, settings)
    assert factor.dead == 1
    q = gptq_quantize(w, factor, QuantSpec(8), torch.float32, settings).quantized
    assert torch.isfinite(q.scale).all()
    value = q.dequantize()[:, 5]
    assert torch.allclose(value, w[:, 5], atol=0.03)


def test_damping_is_raised_until_the_factorization_succeeds() -> None:
    x = torch.ones(4, 16)  # rank one
    hessian = x.T @ x / 4
    hessian[3, 3] -= 0.05  # and slightly indefinite
    factor = factor_hessian(hessian, GPTQSettings(dampening_frac=0.01))
    assert factor.dampening_frac > 0.01
    assert torch.isfinite(factor.u).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_input_is_refused(layer, value: float) -> None:
    w, h = layer
    settings = GPTQSettings()
    bad = w.clone()
    bad[0, 0] = value
    with pytest.raises(UserError, match="NaN or infinite"):
        gptq_quantize(bad, factor_hessian(h, settings), QuantSpec(4), torch.float16, settings)
    with pytest.raises(UserError, match="NaN or infinite"):
        factor_hessian(torch.full_like(h, value), settings)


def test_hopeless_hessian_is_refused() -> None:
    h = -torch.ones(8, 8) * 1e3
    h.diagonal().fill_(1.0)
    with pytest.raises(UserError, match="not positive definite"):
        factor_hessian(h, GPTQSettings())


@pytest.mark.parametrize(
    "settings",
    [{"dampening_frac": 0.0}, {"dampening_frac": 2.0}, {"block_size": 0}, {"act_order": "x"},
     {"scale_search": "x"}, {"static_groups": False}],
)  # fmt: skip
def test_impossible_settings_fail_at_construction(settings) -> None:
    with pytest.raises(UserError):
        GPTQSettings(**settings)


@pytest.mark.parametrize("columns", [96, 1027])
def test_hessian_is_the_mean_outer_product(columns: int) -> None:
    g = torch.Generator().manual_seed(1)
    hessian = Hessian(columns)
    x = torch.randn(3, 5, columns, generator=g)
    hessian.add(x[:2])
    hessian.add(x[2:].bfloat16())
    flat = torch.cat([x[:2].reshape(-1, columns), x[2:].bfloat16().float().reshape(-1, columns)])
    assert hessian.tokens == 15
    assert torch.allclose(hessian.mean(), flat.T @ flat / 15, atol=1e-5)
