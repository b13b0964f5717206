"""SmoothQuant's claims: less error than plain W8A8 where inputs have outliers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lowbit.calib.statistics import TOKENS_A_BATCH, ChannelRange, TokenSample
from lowbit.evals.scorer import load_scorer
from lowbit.kernels.errors import UserError
from lowbit.quantize.activations import fake_quantize_input
from lowbit.quantize.passes.awq import fake_quantize
from lowbit.quantize.passes.balance import balanced_scales, rounding_of
from lowbit.quantize.passes.settings import SmoothQuantSettings
from lowbit.quantize.passes.smoothquant import best_alpha, output_error, smooth_scales
from lowbit.quantize.recipe import Calibration, Execution, Recipe, Transform, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.quantize.spec import PRESETS
from torch import Tensor

from .models import change_tensors
from .runtime_models import FAMILIES, save_tiny
from .test_families import token_rows

ROWS, COLUMNS = 48, 128
W8A8 = PRESETS["W8A8"]
EACH_ITS_OWN = torch.arange(COLUMNS)


@pytest.fixture(scope="module")
def outliers() -> tuple[Tensor, Tensor]:
    """A weight and inputs of which a few channels are 50 times the others."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, COLUMNS, generator=g)
    x[:, torch.randperm(COLUMNS, generator=g)[:3]] *= 50
    return torch.randn(ROWS, COLUMNS, generator=g), x


def round_weight(w: Tensor) -> Tensor:
    return fake_quantize(w, W8A8.weights, torch.float32)


def round_input(x: Tensor) -> Tensor:
    assert W8A8.input_activations is not None
    return fake_quantize_input(x, W8A8.input_activations)


def error(w: Tensor, x: Tensor, scales: Tensor) -> float:
    return output_error(w, x, x @ w.T, scales, round_weight, round_input)


def balanced(w: Tensor, x: Tensor) -> Tensor:
    inputs = rounding_of(x.unsqueeze(1), w.square().sum(0) / len(x), 127.5, divided=True)
    weights = rounding_of(w.unsqueeze(1), x.square().mean(0), 127.5)
    return balanced_scales([inputs, weights], EACH_ITS_OWN)


def test_every_way_beats_plain_w8a8_when_inputs_have_outliers(outliers) -> None:
    w, x = outliers
    plain = error(w, x, torch.ones(COLUMNS))
    x_peak, w_peak = x.abs().amax(0), w.abs().amax(0)
    fixed = error(w, x, smooth_scales(x_peak, w_peak, 0.5))
    choice = best_alpha(w, x_peak, x, EACH_ITS_OWN, round_weight, round_input)
    assert fixed < 0.2 * plain
    assert choice.loss <= fixed and choice.plain_loss == pytest.approx(plain)
    assert choice.loss == pytest.approx(error(w, x, choice.scales))
    assert error(w, x, balanced(w, x)) < 1.02 * choice.loss


def test_the_scales_are_the_papers() -> None:
    x, w = torch.tensor([8.0, 2.0, 1.0]), torch.tensor([0.5, 1.0, 2.0])
    got = smooth_scales(x, w, 0.75)
    expected = x**0.75 / w**0.25
    assert torch.allclose(got / got[0], expected / expected[0])
    assert torch.isfinite(smooth_scales(torch.zeros(3), torch.zeros(3), 0.5)).all()


def test_even_inputs_are_left_alone() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, COLUMNS, generator=g), torch.randn(ROWS, COLUMNS, generator=g)
    choice = best_alpha(w, x.abs().amax(0), x, EACH_ITS_OWN, round_weight, round_input)
    assert choice.loss <= choice.plain_loss
    assert error(w, x, balanced(w, x)) < 1.05 * choice.plain_loss


def test_columns_that_share_a_scale_get_one(outliers) -> None:
    w, x = outliers
    columns = torch.arange(COLUMNS // 2).repeat(2)
    choice = best_alpha(w, x.abs().amax(0), x, columns, round_weight, round_input)
    assert choice.scales.shape == (COLUMNS // 2,)
    assert error(w, x, choice.scales[columns]) == pytest.approx(choice.loss)


def test_a_sample_is_spread_over_its_batch() -> None:
    sample = TokenSample(2)
    tokens = torch.arange(4 * 1000 * 2).view(4, 1000, 2).bfloat16()
    sample.add(tokens)
    sample.add(tokens[:1, :3])
    kept = sample.tokens()
    assert abs(len(kept) - TOKENS_A_BATCH) < 10 and kept.dtype == torch.float32
    assert kept[0, 0] < 0.02 * 8000 and kept[-4, 0] > 0.98 * 8000


def test_the_range_of_each_channel() -> None:
    x = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0))
    channels = ChannelRange(4)
    for part in x:
        channels.add(part)
    flat = x.flatten(0, 1)
    assert torch.equal(channels.peak, flat.abs().amax(0))
    assert torch.allclose(channels.mean_abs, flat.abs().mean(0))
    assert torch.allclose(channels.mean_square, flat.square().mean(0))


@pytest.mark.parametrize("bad", [{"alpha": -0.1}, {"alpha": 1.5}, {"search": "x"}])
def test_impossible_settings_fail_at_construction(bad) -> None:
    with pytest.raises(UserError):
        SmoothQuantSettings(**bad)


def widen(tensors: dict[str, Tensor]) -> None:
    """A few channels of each norm 30 times as large, what reads them that much smaller: the model
    computes the same, with outliers."""
    for name, tensor in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensor[[3, 17, 40]] *= 30
        elif name.endswith(
            (
                "q_proj.weight",
                "k_proj.weight",
                "v_proj.weight",
                "gate_proj.weight",
                "up_proj.weight",
            )
        ):
            tensor[:, [3, 17, 40]] /= 30


@pytest.mark.parametrize(
    "how",
    [{}, {"search": "grid"}, {"alpha": 0.5}, {"through_linears": False}],
    ids=["convex", "grid", "alpha", "norms"],
)
def test_a_model_with_outliers_errs_less_when_smoothed(how, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", FAMILIES["llama"]())
    change_tensors(source, widen)
    rows = token_rows(1)
    expected = load_scorer(source)(rows)
    errors = {}
    smooth = Transform("smoothquant", smoothquant=SmoothQuantSettings(**how))
    for name, transforms in {"plain": (), "smooth": (smooth,)}.items():
        recipe = Recipe(
            (*transforms, WeightPass("rtn", "W8A8")),
            Calibration("pydoc", 8, 64),
            Execution(dtype="float32"),
        )
        result = quantize_model(source, tmp_path / name, recipe)
        got = load_scorer(result.out)(rows)
        errors[name] = float((got - expected).norm())
    assert errors["smooth"] < 0.6 * errors["plain"]
    report = json.loads((tmp_path / "smooth" / "quantization_report.json").read_text())
    smoothed = report["transforms"]["model.layers.0"]["smoothquant"]
    assert ("left_alone" in smoothed["mlp.down_proj"]) == (how == {"through_linears": False})
