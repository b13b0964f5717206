"""What the methods claim, on the trained tiny Llama: KL divergence from the original."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lowbit.calib.text import load_text
from lowbit.evals.measure import measure_models
from lowbit.evals.protocols import plan_windowing
from lowbit.quantize.recipe import Calibration, Execution, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model


@pytest.fixture(scope="module")
def data() -> Path:
    if "LOWBIT_TEST_DATA" not in os.environ:
        pytest.skip("LOWBIT_TEST_DATA is not set: the trained tiny Llama is not here")
    return Path(os.environ["LOWBIT_TEST_DATA"])


def test_gptq_beats_rtn_in_both_orders_and_asymmetric_helps_rtn(data: Path, tmp_path: Path) -> None:
    model = data / "stories260k-ffn192"
    calibration = Calibration(str(data / "text/tinystories_train_sample.txt"), 32, 256)
    recipes = {
        "rtn": WeightPass(method="rtn"),
        "rtn_asym": WeightPass(method="rtn", scheme="W4A16_ASYM"),
        "gptq": WeightPass(),
        "parallel": WeightPass(),
    }
    for name, weight_pass in recipes.items():
        order = "parallel" if name == "parallel" else "sequential"
        recipe = Recipe((weight_pass,), calibration, Execution(order, dtype="float32"))
        quantize_model(model, tmp_path / name, recipe)
    report = measure_models(
        {"original": model, **{name: tmp_path / name for name in recipes}},
        load_text(str(data / "text/tinystories_valid.txt"), "evaluation"),
        plan_windowing([model], ctx=256, windows=8),
        base="original",
    )
    kld = {row.name: row.divergence.kld_mean for row in report.rows if row.divergence}
    assert kld["gptq"] < 0.6 * kld["rtn"]
    assert kld["parallel"] < 0.6 * kld["rtn"]
    assert kld["rtn_asym"] < kld["rtn"]
