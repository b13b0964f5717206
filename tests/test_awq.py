"""AWQ's claims: less output error than rounding where inputs have outliers, by every search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.calib.layer_worker import InputGroup
from lowbit.calib.model import LayerCall
from lowbit.evals.scorer import load_scorer
from lowbit.kernels.errors import UserError
from lowbit.quantize.block_loss import BlockLoss
from lowbit.quantize.folds import Fold
from lowbit.quantize.passes.awq import (
    clip_weight,
    fake_quantize,
    grid_scales,
    hessian_loss,
    relative_magnitude,
)
from lowbit.quantize.passes.balance import (
    Rounding,
    balanced_scales,
    expected_error,
    rounding_of,
)
from lowbit.quantize.passes.settings import AWQSettings
from lowbit.quantize.ranges import grouped
from lowbit.quantize.recipe import Calibration, Execution, Recipe, Transform, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.quantize.spec import Channel, Group, QuantSpec
from torch import Tensor, nn

from .runtime_models import FAMILIES, save_tiny
from .test_families import token_rows

ROWS, COLUMNS = 48, 128
SPECS = {
    "asym": QuantSpec(4, granularity=Group(32), symmetric=False),
    "sym": QuantSpec(4, granularity=Group(32)),
    "channel": QuantSpec(4, granularity=Channel()),
    "3bit": QuantSpec(3, granularity=Group(64), symmetric=False),
}
EACH_ITS_OWN = torch.arange(COLUMNS)


@pytest.fixture(scope="module")
def outliers() -> tuple[list[Tensor], Tensor]:
    """Two weights and their input, which has a few channels that are 20 times the others."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, COLUMNS, generator=g)
    x[:, torch.randperm(COLUMNS, generator=g)[:6]] *= 20
    return [torch.randn(ROWS, COLUMNS, generator=g) for _ in range(2)], x


def scaled_error(weights: list[Tensor], x: Tensor, spec: QuantSpec, scales: Tensor) -> float:
    """The true output error of rounding with `scales` [in]."""
    error = 0.0
    for w in weights:
        value = fake_quantize(w * scales, spec, torch.float32) / scales
        error += float((x @ (value - w).T).square().sum()) / len(x)
    return error


def found_scales(weights: list[Tensor], x: Tensor, spec: QuantSpec, search: str) -> Tensor:
    hessian = x.T @ x / len(x)
    if search == "convex":
        per_row = QuantSpec(spec.num_bits, granularity=spec.granularity)
        values = torch.cat([grouped(w, per_row) for w in weights])
        return balanced_scales([rounding_of(values, hessian.diagonal(), 7.5)], EACH_ITS_OWN)
    return grid_scales(
        weights, x.abs().mean(0), EACH_ITS_OWN, spec, AWQSettings(),
        lambda w: fake_quantize(w, spec, torch.float32), hessian_loss(weights, hessian),
    ).scales  # fmt: skip


@pytest.mark.parametrize("search", ["grid", "convex"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_beats_rounding_when_inputs_have_outliers(outliers, spec: QuantSpec, search: str) -> None:
    weights, x = outliers
    plain = scaled_error(weights, x, spec, torch.ones(COLUMNS))
    assert scaled_error(weights, x, spec, found_scales(weights, x, spec, search)) < 0.7 * plain


def test_the_grid_takes_the_least_of_what_it_tries(outliers) -> None:
    weights, x = outliers
    spec, hessian = SPECS["asym"], x.T @ x / len(x)
    results = {
        duo: grid_scales(
            weights, x.abs().mean(0), EACH_ITS_OWN, spec, AWQSettings(duo_scaling=duo),
            lambda w: fake_quantize(w, spec, torch.float32), hessian_loss(weights, hessian),
        )
        for duo in ("off", "on", "auto")
    }  # fmt: skip
    assert (
        results["auto"].loss == min(r.loss for r in results.values()) < results["auto"].plain_loss
    )
    assert results["on"].duo and not results["off"].duo
    best = results["auto"]
    assert best.loss == pytest.approx(scaled_error(weights, x, spec, best.scales), rel=1e-3)
    assert best.plain_loss == pytest.approx(
        scaled_error(weights, x, spec, torch.ones(COLUMNS)), rel=1e-3
    )


def test_even_inputs_need_no_scales() -> None:
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(ROWS, COLUMNS, generator=g), torch.randn(4096, COLUMNS, generator=g)
    scales = found_scales([w], x, SPECS["asym"], "convex")
    plain = scaled_error([w], x, SPECS["asym"], torch.ones(COLUMNS))
    assert scaled_error([w], x, SPECS["asym"], scales) < 1.02 * plain


def test_relative_magnitude_is_the_papers(outliers) -> None:
    weights, _ = outliers
    expected = torch.zeros(COLUMNS)
    for w in weights:
        for row in w:
            for start in range(0, COLUMNS, 32):
                group = row[start : start + 32].abs()
                expected[start : start + 32] += group / group.max() / (2 * ROWS)
    assert torch.allclose(relative_magnitude(weights, SPECS["asym"]), expected, atol=1e-5)


shapes = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 8), st.booleans())


def rounding(shape: tuple[int, int, int, bool], seed: int) -> Rounding:
    rows, groups, size, divided = shape
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, groups, size, generator=g)
    energy = torch.rand(groups * size, generator=g) + 0.01
    return rounding_of(values, energy, 7.5, divided)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_the_expected_error_is_convex_and_its_slope_right(shape, seed: int) -> None:
    problem = rounding(shape, seed)
    count = shape[1] * shape[2]
    g = torch.Generator().manual_seed(seed + 1)
    one, other = torch.randn(2, count, generator=g)

    def error(log_factors: Tensor) -> float:
        return expected_error(problem, log_factors.exp())[0]

    middle = error((one + other) / 2)
    assert middle <= (error(one) * error(other)) ** 0.5 * (1 + 1e-4)  # even its logarithm is
    value, slope = expected_error(problem, one.exp())
    step = 1e-2 * other / other.norm()
    got = error(one + step) - error(one - step)
    assert got == pytest.approx(2 * float(slope @ step), abs=1e-3 * value)


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_balanced_scales_never_expect_more_than_none(shape, seed: int) -> None:
    problem = rounding(shape, seed)._replace(divided=False)
    count = shape[1] * shape[2]
    scales = balanced_scales([problem], torch.arange(count))
    assert scales.max() * scales.min() == pytest.approx(1, rel=1e-3)
    plain = expected_error(problem, torch.ones(count))[0]
    assert expected_error(problem, scales)[0] <= plain * (1 + 1e-3)


def test_groups_of_zeros_have_finite_scales() -> None:
    values = torch.randn(8, 2, 16)
    values[:, 1] = 0
    assert torch.isfinite(balanced_scales([rounding_of(values, torch.ones(32), 7.5)],
                                          torch.arange(32))).all()  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_clipping_makes_the_output_error_smaller(outliers, spec: QuantSpec) -> None:
    weights, x = outliers
    w = weights[0].clone()
    w[:, 5] *= 6  # one column forces a wide range on its group
    hessian = x.T @ x / len(x)
    hessian[5], hessian[:, 5] = 0, 0
    hessian[5, 5] = 1e-3  # and hardly matters
    loss = hessian_loss([w], hessian)
    clipped = clip_weight(w, hessian, spec, torch.float32, AWQSettings())
    plain = loss([fake_quantize(w, spec, torch.float32)])
    assert loss([fake_quantize(clipped, spec, torch.float32)]) < 0.9 * plain
    assert bool((clipped.abs() <= w.abs()).all())


def test_the_block_loss_is_the_error_of_the_blocks_output() -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))})
    mlp = layer["mlp"]
    layer.forward = lambda x: x + mlp(x)  # type: ignore[method-assign]
    calls = [LayerCall(torch.randn(2, 3, 8), {}) for _ in range(4)]
    names = torch.arange(8)
    fold = Fold(("mlp.0",), "norm", 0.0, False, names, names)
    with torch.inference_mode():
        group = InputGroup({"mlp.0": mlp[0]}, {})
        loss = BlockLoss(layer, group, calls, fold, AWQSettings(loss_rows=4))
        before = mlp[0].weight.detach().clone()
        assert loss([before]) == 0
        other = before + 0.1
        got = loss([other])
        assert torch.equal(mlp[0].weight, before), "the weight was not put back"
        x = torch.cat([c.hidden for c in calls[:2]])  # 4 rows: the first two batches
        moved = torch.nn.functional.linear(x, other, mlp[0].bias)
        expected = (mlp[2](torch.relu(moved)) - mlp(x)).square().sum() / 12
        assert got == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("bad", [{"search": "x"}, {"n_grid": 0}, {"duo_scaling": "x"},
                                 {"loss": "x"}, {"loss_rows": 0}])  # fmt: skip
def test_impossible_settings_fail_at_construction(bad) -> None:
    with pytest.raises(UserError):
        AWQSettings(**bad)


@pytest.mark.parametrize(
    ("family", "search"),
    [("llama", "convex"), ("llama", "grid"), ("gemma3", "convex"), ("opt", "convex")],
)
def test_checkpoints_with_folded_norms_compute_what_the_model_does(
    family: str, search, tmp_path: Path
) -> None:
    """At 8 bits little error is left, so a fold that was not stored would show."""
    source = save_tiny(tmp_path / "model", FAMILIES[family]())
    awq = Transform("awq", awq=AWQSettings(search=search, n_grid=4))
    recipe = Recipe(
        (awq, WeightPass("rtn", "W8A16", 16)),
        Calibration("pydoc", 4, 32),
        Execution(dtype="float32"),
    )
    result = quantize_model(source, tmp_path / "out", recipe)
    rows = token_rows(1)
    expected, got = load_scorer(source)(rows), load_scorer(result.out)(rows)
    assert float((got - expected).norm() / expected.norm()) < 0.06
    report = json.loads((result.out / "quantization_report.json").read_text())
    for layer in report["transforms"].values():
        assert all("feeder" in group for group in layer["awq"].values())
        assert any(group["scales"][1] > 1.1 for group in layer["awq"].values())
