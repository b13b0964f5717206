"""A bit budget on the trained tiny Llama: its promises about bits, divergence and resuming."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lowbit.calib.text import load_text
from lowbit.evals.measure import measure_models
from lowbit.evals.protocols import plan_windowing
from lowbit.kernels.errors import UserError
from lowbit.quantize import budget_plan
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.passes.settings import BudgetSettings
from lowbit.quantize.recipe import Calibration, Execution, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model

from .models import change_json, change_tensors, copied


@pytest.fixture(scope="module")
def data() -> Path:
    if "LOWBIT_TEST_DATA" not in os.environ:
        pytest.skip("LOWBIT_TEST_DATA is not set: the trained tiny Llama is not here")
    return Path(os.environ["LOWBIT_TEST_DATA"])


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float16, so that scales take 16 bits, not 32."""
    folder = copied(data / "stories260k-ffn192", tmp_path_factory.mktemp("half") / "model")
    change_tensors(folder, lambda t: t.update({name: x.half() for name, x in t.items()}))
    change_json(folder / "config.json", lambda c: c.update(dtype="float16"))
    return folder


def recipe(
    data: Path, *passes: WeightPass, budget: BudgetSettings | None = None, samples: int = 24
) -> Recipe:
    calibration = Calibration(str(data / "text/tinystories_train_sample.txt"), samples, 256)
    return Recipe(passes, calibration, Execution(dtype="float32"), budget)


def mix(targets: str) -> tuple[WeightPass, WeightPass]:
    """W4 where `targets` say, W3 elsewhere."""
    return (
        WeightPass(scheme="W4A16", group_size=64, targets=(targets,)),
        WeightPass(scheme="W3A16", group_size=64, ignore=(targets,)),
    )


def test_beats_uniform_and_naive_mixes_of_as_many_bits(data, model, tmp_path) -> None:
    budget = BudgetSettings(3.5)
    result = quantize_model(model, tmp_path / "b", recipe(data, WeightPass(), budget=budget))
    others = {
        "uniform": (WeightPass(scheme="W3A16", group_size=32),),
        "last layer": mix(r"re:model\.layers\.4\..*"),
        "down_proj": mix(r"re:.*\.down_proj"),
    }
    for name, passes in others.items():
        quantize_model(model, tmp_path / name, recipe(data, *passes))
    report = measure_models(
        {"original": model, "budget": tmp_path / "b", **{n: tmp_path / n for n in others}},
        load_text(str(data / "text/tinystories_valid.txt"), "evaluation"),
        plan_windowing([model], ctx=256, windows=8),
        base="original",
    )
    rows = {row.name: row for row in report.rows}
    kld = {name: row.divergence.kld_mean for name, row in rows.items() if row.divergence}
    bits = {name: row.size.quantized_bits_per_weight for name, row in rows.items()}
    assert result.budget is not None
    assert bits["budget"] == pytest.approx(result.budget.bits) and result.budget.bits <= 3.5
    assert kld["budget"] == pytest.approx(result.budget.predicted_kld, rel=0.25)
    for name in others:
        assert (bits[name] or 0) > 3.45 and kld["budget"] < 0.9 * kld[name], name


def test_fused_peers_share_a_scheme_and_the_report_is_whole(data, model, tmp_path) -> None:
    budget = BudgetSettings(4.2)
    rounded = recipe(data, WeightPass(method="rtn"), budget=budget, samples=4)
    found = quantize_model(model, tmp_path / "b", rounded).budget
    assert found is not None and found.bound <= found.predicted_kld
    costs = [point["predicted_kld"] for point in found.frontier]
    assert costs == sorted(costs, reverse=True)
    for name, point in found.uniform.items():
        assert point["bits"] > 4.2 or point["predicted_kld"] >= found.predicted_kld, name
    schemes = Checkpoint(tmp_path / "b").schemes
    assert len(set(schemes.values())) > 1
    for layer in range(5):
        prefix = f"model.layers.{layer}"
        for names in (("q", "k", "v"), ("gate", "up")):
            block = "self_attn" if "q" in names else "mlp"
            assert len({schemes[f"{prefix}.{block}.{n}_proj"] for n in names}) == 1


def test_a_resumed_run_takes_what_was_chosen(data, model, tmp_path, monkeypatch) -> None:
    asked = recipe(data, WeightPass(), budget=BudgetSettings(3.5, (3, 4)), samples=2)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lowbit.quantize.worker.PassWorker.finish", killed)
        quantize_model(model, tmp_path / "b", asked)
    monkeypatch.setattr(budget_plan, "measure_sensitivity", killed)
    first = quantize_model(model, tmp_path / "b", asked).budget
    monkeypatch.undo()
    assert first == quantize_model(model, tmp_path / "again", asked).budget


def test_a_budget_is_part_of_the_recipe_and_is_checked() -> None:
    asked = Recipe((WeightPass(),), budget=BudgetSettings(3.5, num_bits=(3, 4)))
    assert Recipe.from_dict(asked.to_dict()) == asked
    assert "budget" not in Recipe().to_dict()
    for wrong, message in (
        ({"bits": 0.5}, "over 1 and at most 16"),
        ({"bits": 3.5, "num_bits": [1, 4]}, "from 2 to 8, got 1"),
        ({"bits": 3.5, "num_bits": ["4"]}, "list of whole numbers"),
        ({"bit": 3.5}, "did you mean 'bits'"),
    ):
        with pytest.raises(UserError, match=message):
            Recipe.from_dict({"budget": wrong})
    with pytest.raises(UserError, match="stores floats"):
        Recipe((WeightPass(scheme="FP8_DYNAMIC"),), budget=BudgetSettings(3.5))
    with pytest.raises(UserError, match="saves nothing with W4A8"):
        Recipe((WeightPass(scheme="W4A8"),), budget=BudgetSettings(3.5))


def test_what_cannot_be_kept_is_refused(data, model, tmp_path) -> None:
    with pytest.raises(UserError, match=r"1\.5 bits per weight cannot be kept.*take 2\.2"):
        quantize_model(
            model,
            tmp_path / "b",
            recipe(data, WeightPass(), budget=BudgetSettings(1.5), samples=1),
        )
    # it leaves nothing that stands in the way of one that can be
    kept = recipe(data, WeightPass(), budget=BudgetSettings(3.5, samples=1), samples=1)
    assert quantize_model(model, tmp_path / "b", kept).resumed_layers == 0
