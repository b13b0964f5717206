"""What sensitivity claims: bits as they are stored, divergences as they come out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lowbit.calib.fisher import LayerFisher, OutputFisher, run_backward
from lowbit.calib.model import LayeredModel
from lowbit.calib.statistics import Hessian
from lowbit.calib.text import load_text, load_tokenizer, token_rows
from lowbit.quantize.budget_plan import candidate_linears
from lowbit.quantize.checkpoint.compress import compress
from lowbit.quantize.linear_plan import make_plan
from lowbit.quantize.passes.gptq import factor_hessian, gptq_quantize
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.passes.settings import BudgetSettings, GPTQSettings
from lowbit.quantize.recipe import Recipe
from lowbit.quantize.sensitivity import measure_sensitivity, rounding_costs, stored_bits
from lowbit.quantize.spec import Channel, Group, LayerScheme, QuantSpec
from transformers import AutoModelForCausalLM

from . import moe_models, runtime_models


@pytest.mark.parametrize("num_bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("granularity", [Group(16), Channel()], ids=["group", "channel"])
def test_bits_are_those_that_are_stored(num_bits: int, symmetric: bool, granularity) -> None:
    w = torch.randn(10, 48, generator=torch.Generator().manual_seed(0)).half()
    spec = QuantSpec(num_bits, granularity=granularity, symmetric=symmetric)
    scheme = LayerScheme(spec)
    stored = compress("linear", rtn_quantize(w, spec, w.dtype), scheme)
    assert stored_bits(scheme, (10, 48), w.dtype) == 8 * sum(t.nbytes for t in stored.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "phi3"])
def test_every_linear_is_in_one_unit_and_a_layer_s_experts_are_one(family: str, tmp_path) -> None:
    make = moe_models.FAMILIES.get(family) or runtime_models.FAMILIES[family]
    model = LayeredModel(runtime_models.save_tiny(tmp_path / family, make()))
    linears = candidate_linears(
        make_plan(model, Recipe()), BudgetSettings(4.5, num_bits=(3, 4), group_sizes=(16, 32))
    )
    units = measure_sensitivity(model, torch.randint(3, 90, (3, 16)), linears)
    assert sorted(n for unit in units for n in unit.linears) == sorted(linears)
    experts = [unit for unit in units if any(".experts." in n for n in unit.linears)]
    assert len(experts) == (0 if family == "phi3" else len(model.layers))
    for unit in units:
        costs = {option.key: option.cost for option in unit.options}
        three, four = (
            min(c for k, c in costs.items() if k.weights.num_bits == b)  # type: ignore[union-attr]
            for b in (3, 4)
        )
        assert 0 < four < three


@pytest.fixture(scope="module")
def data() -> Path:
    if "LOWBIT_TEST_DATA" not in os.environ:
        pytest.skip("LOWBIT_TEST_DATA is not set: the trained tiny Llama is not here")
    return Path(os.environ["LOWBIT_TEST_DATA"])


def test_predicts_the_divergence_of_each_input_s_linears(data: Path) -> None:
    """One backward pass against a forward pass of the quantized model for each, at 3 bits."""
    folder = data / "stories260k-ffn192"
    tokenizer = load_tokenizer(folder)
    rows = {
        file: token_rows(load_text(str(data / f"text/{file}.txt"), "evaluation"), tokenizer, 8, 256)
        for file in ("tinystories_train_sample", "tinystories_valid")
    }
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    spec, settings = QuantSpec(3, granularity=Group(32)), GPTQSettings()
    predicted, measured = [], []

    @torch.no_grad()
    def log_probs() -> torch.Tensor:
        return whole(input_ids=rows["tinystories_valid"], use_cache=False).logits.log_softmax(-1)

    base = log_probs()

    def visit(layer: LayerFisher) -> None:
        for shared in layer.inputs:
            hessian = shared.hessian.mean()
            factor = factor_hessian(hessian, settings)
            weights = {n: whole.get_submodule(n).weight for n in shared.readers}
            originals = {n: w.data for n, w in weights.items()}
            for n, w in originals.items():
                weights[n].data = gptq_quantize(
                    w, factor, spec, torch.float16, settings
                ).quantized.dequantize()
            measured.append((base.exp() * (base - log_probs())).sum(-1).mean())
            for n, w in originals.items():
                weights[n].data = w
            costs = [
                rounding_costs(
                    w, [spec], shared.hessian, factor, layer.fisher[n], torch.float16, True
                )
                for n, w in originals.items()
            ]
            predicted.append(sum(cost for [cost] in costs))

    run_backward(LayeredModel(folder), rows["tinystories_train_sample"], lambda n: True, visit)
    ratio = torch.tensor(predicted) / torch.tensor(measured)
    assert len(ratio) == 20 and ratio.min() > 0.5 and ratio.max() < 2
    ranks = torch.stack([t.argsort().argsort() for t in map(torch.tensor, (predicted, measured))])
    assert torch.corrcoef(ranks.double())[0, 1] > 0.9


def test_few_tokens_foresee_as_much_error_as_many() -> None:
    """A factor fitted to few tokens leaves too little error on those very tokens."""
    columns, spec, settings = 96, QuantSpec(4, granularity=Group(32)), GPTQSettings()
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(columns, columns, generator=g) / columns**0.5 + 0.5 * torch.eye(columns)
    w = 0.1 * torch.randn(64, columns, generator=g)
    fresh = torch.randn(20_000, columns, generator=g) @ mix
    fisher = OutputFisher(torch.nn.Linear(columns, 64, bias=False))
    fisher.add(fresh, torch.ones(len(fresh), 64))  # each output weighs 1: cost = error / 2
    predicted, left, seen = [], [], []
    for tokens in (400, 20_000):
        hessian = Hessian(columns)
        hessian.add(torch.randn(tokens, columns, generator=g) @ mix)
        factor = factor_hessian(hessian.mean(), settings)
        predicted += rounding_costs(w, [spec], hessian, factor, fisher, torch.float16, True)
        solved = gptq_quantize(w, factor, spec, torch.float16, settings)
        error = w - solved.quantized.dequantize()
        left.append(0.5 * float((error @ fresh.T).square().sum()) / len(fresh))
        seen.append(0.5 * float(solved.error.sum()))
    assert predicted[0] == pytest.approx(predicted[1], rel=0.05)
    assert seen[0] < 0.92 * seen[1]
    assert all(0.6 * error < cost < error for cost, error in zip(predicted, left, strict=True))
