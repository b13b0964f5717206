"""A checkpoint held against its original, and the command around the examination."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.quantize import run, verify
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.recipe import Recipe
from lowbit.quantize.verification.findings import AGAINST
from torch import Tensor

from .command import Commands
from .damage import Damage
from .models import change_json, change_tensors, copied
from .moe_models import FAMILIES as MOE
from .runtime_models import FAMILIES as DENSE
from .runtime_models import OTHERS, save_tiny
from .whole_checkpoints import WHOLE, base_model

Q = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"
REPORT = "quantization_report.json"
FAMILIES = {
    **{name: DENSE[name] for name in ("phi3", "opt", "gpt_neox", "gemma3")},
    **{name: MOE[name] for name in ("qwen2_moe", "deepseek_v3", "gpt_oss")},
    "lfm2": OTHERS["lfm2"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def w4(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WHOLE["w4"](base, tmp_path_factory.mktemp("w4") / "w4")


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda folder: change_tensors(folder, lambda t: t.update({name: change(t[name])}))


def smoothed(folder: Path) -> None:
    recipe = {"passes": [{"method": "awq"}, {"method": "gptq"}]}
    (folder / REPORT).write_text(json.dumps({"recipe": recipe}))


DAMAGED: dict[str, tuple[Damage, str]] = {
    "changed tensor": (changed(NORM, lambda t: t + 0.5), NORM),
    "outlier": (changed(f"{Q}.weight_scale", lambda t: 1.5 * t), f"{Q}.weight"),
    "transformed": (smoothed, REPORT),
    "not in the original": (
        lambda f: change_tensors(f, lambda t: t.update(other=torch.ones(2))), "other"),
}  # fmt: skip


def test_errors_are_those_of_the_dequantized_weights(base: Path, w4: Path) -> None:
    report = verify(w4, base)
    assert report.findings == ()
    original, ours = Checkpoint(base), Checkpoint(w4)
    assert {e.name for e in report.errors} == {f"{m}.weight" for m in ours.schemes}
    for e in report.errors:
        weight = original.shards.get(e.name)
        difference = ours.dense_weight(e.name.removesuffix(".weight")) - weight
        assert e.relative_error == pytest.approx((difference.norm() / weight.norm()).item())


@pytest.mark.parametrize("fault", DAMAGED)
def test_each_class_is_found(fault: str, base: Path, w4: Path, tmp_path: Path) -> None:
    damage, where = DAMAGED[fault]
    folder = copied(w4, tmp_path / "checkpoint")
    damage(folder)
    found = [f for f in verify(folder, base).findings if f.fault == fault]
    assert [f.where for f in found] == [where]


def test_every_class_is_tested() -> None:
    assert set(DAMAGED) == set(AGAINST)


def test_tensors_of_another_model_are_outliers(base: Path, w4: Path, tmp_path: Path) -> None:
    folder = copied(w4, tmp_path / "checkpoint")
    shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    changed(f"{Q}.weight_packed", lambda t: t[shuffle])(folder)
    faults = [(f.fault, f.where) for f in verify(folder, base).findings]
    assert faults == [("outlier", f"{Q}.weight")]


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_what_a_recipe_rescales_is_compared_up_to_its_scales(
    method: str, base: Path, story: Path, tmp_path: Path
) -> None:
    recipe = Recipe.from_dict({
        "passes": [{"method": method}, {"method": "rtn", "scheme": "W8A8"}],
        "calibration": {"source": str(story), "samples": 4, "seq_len": 32},
        "execution": {"dtype": "float32"},
    })  # fmt: skip
    run(str(base), str(tmp_path / "out"), recipe)
    report = verify(tmp_path / "out", base)
    assert [f.fault for f in report.findings] == ["transformed"]
    assert median(e.relative_error for e in report.errors) < 0.05
    change_json(tmp_path / "out" / REPORT, lambda r: r["recipe"]["passes"].pop(0))
    assert "changed tensor" in {f.fault for f in verify(tmp_path / "out", base).findings}


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_other_families_are_whole(family: str, tmp_path: Path) -> None:
    """Renamed and fused tensors, biases, experts: nothing is missing and nothing too many."""
    model = save_tiny(tmp_path / "model", FAMILIES[family]())
    recipe = Recipe.from_dict({"passes": [{"method": "rtn", "scheme": "FP8_DYNAMIC"}]})
    run(model, tmp_path / "out", recipe)
    assert verify(model).findings == ()
    report = verify(tmp_path / "out", model)
    assert report.findings == () and report.quantized > 7


def test_there_has_to_be_an_original(w4: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder of an original"):
        verify(w4, tmp_path / "nowhere")
    with pytest.raises(UserError, match="no such checkpoint"):
        verify(tmp_path / "nowhere")


def test_the_command_says_what_the_function_finds(
    base: Path, w4: Path, command: Commands, tmp_path: Path
) -> None:
    whole = command("verify", w4, "--against", base)
    assert (whole.code, whole.stderr) == (0, "")
    assert "whole: " in whole.stdout and "14 quantized linears" in whole.stdout
    assert "largest relative errors" in whole.stdout
    folder = copied(w4, tmp_path / "checkpoint")
    changed(f"{Q}.weight_scale", lambda t: t * float("nan"))(folder)
    broken = command("verify", folder)
    assert broken.code == 1
    for part in (
        "scale not finite",
        f"{Q}.weight_scale",
        "expected finite",
        "becomes NaN",
        "not w",
    ):
        assert part in broken.stdout
    facts = command("verify", folder, "--json")
    assert facts.code == 1
    value = json.loads(facts.stdout)
    assert value["whole"] is False and value["layout"] == "compressed-tensors"
    assert value["findings"][0]["fault"] == "scale not finite"
    command("verify", tmp_path / "nowhere").refuses("no such checkpoint")
