"""What learned rounding claims: a layer's output comes nearer than GPTQ brings it, and a trained
model at 2 bits is left a better language model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lowbit.calib.model import LayerCall, LayeredModel, forward_layer
from lowbit.calib.statistics import Hessian
from lowbit.calib.text import load_text
from lowbit.evals.measure import measure_models
from lowbit.evals.protocols import plan_windowing
from lowbit.kernels.errors import UserError
from lowbit.quantize.passes.gptq import factor_hessian, gptq_quantize
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.passes.settings import GPTQSettings, SignRoundSettings
from lowbit.quantize.passes.signround import (
    check_learnable,
    nearest_start,
    signround_layer,
    take_rows,
)
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.recipe import Calibration, Execution, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.quantize.spec import Block, Channel, Group, QuantSpec
from torch import Tensor, nn

QUICK = SignRoundSettings(iterations=40, batch_size=16)


def observer(hessian: Hessian) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    return lambda _, args: hessian.add(args[0])


class Case:
    """A decoder layer of a random Llama, its linears' weights and Hessians, and batches of rows:
    the first are for calibration, `held_out` for judging."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = LayeredModel(folder)
        name = next(iter(model.layers))
        rows = torch.randint(0, 60, (96, 32))
        calls = [batch[name] for batch in model.layer_calls(rows, 16)]
        self.layer = model.layers[name].to_empty(device="cpu")
        for parameter in self.layer.parameters():
            if parameter.ndim == 2:  # of a size that makes attention and MLP speak
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            else:
                nn.init.ones_(parameter)
        mix = torch.randn(calls[0].hidden.shape[-1], calls[0].hidden.shape[-1]) / 8
        calls = [LayerCall((c.hidden * 50) @ mix, c.kwargs) for c in calls]
        self.calls, self.held_out = calls[:4], calls[4:]
        self.weights: dict[str, Tensor] = {}
        self.hessians: dict[str, Hessian] = {}
        for inner, module in self.layer.named_modules():
            if isinstance(module, nn.Linear):
                self.weights[inner] = module.weight.data.clone()
                self.hessians[inner] = Hessian(module.in_features)
                module.register_forward_pre_hook(observer(self.hessians[inner]))
        with torch.no_grad():
            self.targets = [forward_layer(self.layer, c) for c in self.calls]
        for module in self.layer.modules():
            module._forward_pre_hooks.clear()

    def gptq(self, spec: QuantSpec) -> dict[str, Quantized]:
        settings = GPTQSettings()
        return {
            n: gptq_quantize(
                w, factor_hessian(self.hessians[n].mean(), settings), spec, torch.float16, settings
            ).quantized
            for n, w in self.weights.items()
        }

    def nearest(self, spec: QuantSpec) -> dict[str, Quantized]:
        return {
            n: nearest_start(w, spec, torch.float16, self.hessians[n].mean().diagonal())
            for n, w in self.weights.items()
        }

    @torch.no_grad()
    def error(self, quantized: dict[str, Quantized]) -> float:
        """Relative error of the layer's output on rows that nothing was learned from."""
        expected = [forward_layer(self.layer, c) for c in self.held_out]
        for n, q in quantized.items():
            self.layer.get_submodule(n).weight.data = q.dequantize()
        got = [forward_layer(self.layer, c) for c in self.held_out]
        for n, w in self.weights.items():
            self.layer.get_submodule(n).weight.data = w
        errors = [
            (g - e).square().sum() / e.square().sum() for g, e in zip(got, expected, strict=True)
        ]
        return float(sum(errors) / len(errors))

    def learn(
        self, start: dict[str, Quantized], settings: SignRoundSettings = QUICK
    ) -> dict[str, Quantized]:
        r = signround_layer(self.layer, self.weights, start, self.calls, self.targets, settings)
        assert r.error <= r.start_error
        return r.quantized


@pytest.fixture(scope="module")
def case(tiny: Path) -> Iterator[Case]:
    yield Case(tiny)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("num_bits", [2, 3, 4])
def test_output_error_is_below_gptqs(case: Case, num_bits: int, symmetric: bool) -> None:
    spec = QuantSpec(num_bits, granularity=Group(16), symmetric=symmetric)
    gptq = case.gptq(spec)
    rtn = {n: rtn_quantize(w, spec, torch.float16) for n, w in case.weights.items()}
    learned = case.error(case.learn(gptq))
    assert learned < 0.8 * case.error(gptq)
    assert learned < 0.5 * case.error(rtn)


def test_learns_from_the_nearest_codes(case: Case) -> None:
    spec = QuantSpec(3, granularity=Group(16))
    nearest = case.nearest(spec)
    assert case.error(case.learn(nearest)) < 0.7 * case.error(nearest)


def test_equal_seeds_give_equal_codes(case: Case) -> None:
    start = case.gptq(QuantSpec(2, granularity=Channel()))
    few = SignRoundSettings(iterations=20, batch_size=5)
    one, same = case.learn(start, few), case.learn(start, few)
    other = case.learn(start, replace(few, seed=1))
    for name in start:
        assert torch.equal(one[name].codes, same[name].codes)
        assert torch.equal(one[name].scale, same[name].scale)
    assert any(not torch.equal(one[n].codes, other[n].codes) for n in start)


def test_a_good_start_is_kept(case: Case) -> None:
    """Eight bits leave nothing to learn in one wild step, so what comes back is the start."""
    start = case.gptq(QuantSpec(8, granularity=Group(16)))
    kept = case.learn(start, SignRoundSettings(iterations=1, reach=2.0, scale_reach=0.5))
    assert all(torch.equal(kept[n].codes, start[n].codes) for n in start)
    assert all(torch.equal(kept[n].scale, start[n].scale) for n in start)


def test_layer_in_inference_mode_is_left_as_it_was(case: Case) -> None:
    before = {n: p.clone() for n, p in case.layer.state_dict().items()}
    start = case.gptq(QuantSpec(3, granularity=Group(16)))
    few = SignRoundSettings(iterations=2)
    with torch.inference_mode():
        calls = [LayerCall(c.hidden.clone(), c.kwargs) for c in case.calls]
        signround_layer(case.layer, case.weights, start, calls, case.targets, few)
    assert all(torch.equal(p, before[n]) for n, p in case.layer.state_dict().items())


def test_non_finite_rows_are_left_out(case: Case) -> None:
    start, few = case.gptq(QuantSpec(3, granularity=Group(16))), SignRoundSettings(iterations=4)
    calls = [LayerCall(c.hidden.clone(), c.kwargs) for c in case.calls]
    calls[0].hidden[0] = float("nan")
    result = signround_layer(case.layer, case.weights, start, calls, case.targets, few)
    assert 0 < result.error <= result.start_error
    with pytest.raises(UserError, match="non-finite"):
        hopeless = [t * float("inf") for t in case.targets]
        signround_layer(case.layer, case.weights, start, calls, hopeless, few)


def test_rows_are_cut_out_of_all_that_counts_rows() -> None:
    x = torch.arange(12.0).reshape(4, 3, 1)
    call = LayerCall(x, {"mask": x[:, None], "pair": (x[:1], x), "flag": True, "shared": x[0]})
    cut = take_rows(call, torch.tensor([2, 0]))
    assert torch.equal(cut.hidden, x[[2, 0]])
    assert torch.equal(cut.kwargs["mask"], x[[2, 0]][:, None])
    assert torch.equal(cut.kwargs["pair"][0], x[:1])
    assert torch.equal(cut.kwargs["pair"][1], x[[2, 0]])
    assert torch.equal(cut.kwargs["shared"], x[0])


@pytest.mark.parametrize(
    "spec", [QuantSpec(4, "float", Group(16)), QuantSpec(4, "int", Block(8, 8))]
)
def test_formats_without_latents_are_refused(spec: QuantSpec) -> None:
    with pytest.raises(UserError, match="signround"):
        check_learnable(spec)


@pytest.mark.parametrize(
    "settings",
    [{"iterations": 0}, {"batch_size": 0}, {"start": "x"}, {"reach": 0.0}, {"reach": 2.5},
     {"scale_reach": -0.1}, {"scale_reach": 0.6}, {"seed": -1}],
)  # fmt: skip
def test_impossible_settings_fail_at_construction(settings) -> None:
    with pytest.raises(UserError):
        SignRoundSettings(**settings)


def test_beats_gptq_at_two_bits_on_a_trained_model(tmp_path: Path) -> None:
    if "LOWBIT_TEST_DATA" not in os.environ:
        pytest.skip("LOWBIT_TEST_DATA is not set: the trained tiny Llama is not here")
    data = Path(os.environ["LOWBIT_TEST_DATA"])
    model = data / "stories260k-ffn192"
    calibration = Calibration(str(data / "text/tinystories_train_sample.txt"), 24, 256)
    recipes = {
        "gptq": WeightPass("gptq", "W2A16", 32),
        "signround": WeightPass(
            "signround", "W2A16", 32, signround=SignRoundSettings(iterations=30)
        ),
    }
    for name, weight_pass in recipes.items():
        recipe = Recipe((weight_pass,), calibration, Execution(dtype="float32"))
        quantize_model(model, tmp_path / name, recipe)
    report = measure_models(
        {"original": model, **{name: tmp_path / name for name in recipes}},
        load_text(str(data / "text/tinystories_valid.txt"), "evaluation"),
        plan_windowing([model], ctx=256, windows=6),
        base="original",
    )
    kld = {row.name: row.divergence.kld_mean for row in report.rows if row.divergence}
    assert kld["signround"] < 0.6 * kld["gptq"]
