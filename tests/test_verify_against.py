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
from lowbit.quantize.checkpoint.manifest import MANIFEST
from lowbit.quantize.cli.recipe_options import build_recipe
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.reader import GGUFFile
from lowbit.quantize.recipe import Recipe
from lowbit.quantize.verification.findings import AGAINST
from torch import Tensor

from .command import Commands
from .damage import Damage
from .models import add_merge, change_json, change_tensors, copied
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


def flipped(name: str, share: float) -> Damage:
    """Some bytes of a tensor replaced by random ones."""

    def damage(t: Tensor) -> Tensor:
        data = t.contiguous().view(torch.uint8).flatten().clone()
        generator = torch.Generator().manual_seed(0)
        places = torch.randperm(len(data), generator=generator)[: int(share * len(data))]
        data[places] ^= torch.randint(1, 256, (len(places),), generator=generator).byte()
        return data.view(t.dtype).view(t.shape)

    return changed(name, damage)


def smoothed(folder: Path) -> None:
    recipe = Recipe.from_dict({"passes": [{"method": "awq"}, {"method": "gptq"}]}).to_dict()
    (folder / REPORT).write_text(json.dumps({"recipe": recipe}))


DAMAGED: dict[str, tuple[Damage, str]] = {
    "changed tensor": (changed(NORM, lambda t: t + 0.5), NORM),
    "outlier": (changed(f"{Q}.weight_scale", lambda t: 1.5 * t), f"{Q}.weight"),
    "transformed": (smoothed, REPORT),
    "unexplained error": (flipped(f"{Q}.weight_packed", 0.02), f"{Q}.weight"),
    "not compared": (lambda f: (f / REPORT).write_text('{"recipe": {"passes": 5}}'), REPORT),
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
    assert faults == [("unexplained error", f"{Q}.weight"), ("outlier", f"{Q}.weight")]


def test_one_code_of_a_rounded_checkpoint_is_named(base: Path, tmp_path: Path) -> None:
    """In 2 bits, too, where no error is larger than rounding's."""
    recipe = {"passes": [{"method": "rtn", "scheme": "W2A16", "group_size": 32}]}
    run(base, tmp_path / "out", Recipe.from_dict(recipe))
    assert not any(f.severity == "error" for f in verify(tmp_path / "out", base).findings)
    (tmp_path / "out" / MANIFEST).unlink()

    def flip(words: Tensor) -> Tensor:
        words[3, 1] ^= 1
        return words

    changed(f"{Q}.weight_packed", flip)(tmp_path / "out")
    (found,) = [f for f in verify(tmp_path / "out", base).findings if f.severity == "error"]
    assert (found.fault, found.where) == ("unexplained error", f"{Q}.weight")
    assert "1 of" in found.found and "(3, 16)" in found.found


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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of larger linears than the others here."""
    config = DENSE["llama"]()
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    return save_tiny(tmp_path_factory.mktemp("wide") / "model", config)


@pytest.mark.parametrize("method", ["rtn", "awq+gptq", "rotate+gptq"])
def test_a_hundredth_of_one_linear_s_bytes_is_missed_by_no_recipe(
    method: str, wide: Path, story: Path, tmp_path: Path
) -> None:
    chosen = build_recipe(
        None, {"scheme": "W4A16", "method": method}, {},
        {"source": str(story), "samples": 4, "seq_len": 64}, {"dtype": "float32"},
    )  # fmt: skip
    run(str(wide), str(tmp_path / "out"), chosen)
    whole = verify(tmp_path / "out", wide)
    assert [f.fault for f in whole.findings] == (["transformed"] if "awq" in method else [])
    (tmp_path / "out" / MANIFEST).unlink()
    down = "model.layers.1.mlp.down_proj"
    flipped(f"{down}.weight_packed", 0.01)(tmp_path / "out")
    found = {f.where for f in verify(tmp_path / "out", wide).findings if f.severity == "error"}
    assert found == {f"{down}.weight"}


def test_a_changed_tensor_of_a_rotated_model_is_found(
    wide: Path, story: Path, tmp_path: Path
) -> None:
    chosen = build_recipe(None, {"scheme": "W4A16", "method": "rotate+rtn"}, {}, {}, {})
    run(str(wide), str(tmp_path / "out"), chosen)
    (tmp_path / "out" / MANIFEST).unlink()
    changed("model.embed_tokens.weight", lambda t: t.roll(1, 0))(tmp_path / "out")
    report = verify(tmp_path / "out", wide)
    assert ("changed tensor", "model.embed_tokens.weight") in {
        (f.fault, f.where) for f in report.findings
    }


@pytest.mark.parametrize("file_type", ["Q4_0", "Q4_K_M", "BF16"])
def test_gguf_files_are_compared_as_they_are_imported(
    file_type: str, wide: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    change_json(copied(wide, tmp_path / "model") / "tokenizer.json", add_merge)
    export_gguf(tmp_path / "model", path, file_type, progress=False)
    report = verify(path, wide)
    assert [f for f in report.findings if f.severity == "error"] == []
    assert bool(report.errors) == (file_type != "BF16")
    stored = GGUFFile(path).tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(stored.nbytes, (stored.nbytes // 50,), generator=generator).tolist():
        data[stored.start + at] ^= 0x5A
    path.write_bytes(data)
    found = {f.where for f in verify(path, wide).findings if f.severity == "error"}
    assert {w for w in found if "down_proj" in w or "ffn_down" in w} == found != set()


def test_keys_and_values_of_one_layer_under_each_other_s_names_are_named(
    wide: Path, tmp_path: Path
) -> None:
    """Which nothing tells without the original: they have one shape."""
    path = tmp_path / "m.gguf"
    change_json(copied(wide, tmp_path / "model") / "tokenizer.json", add_merge)
    export_gguf(tmp_path / "model", path, "Q4_0", progress=False)
    k, v = (GGUFFile(path).tensors[f"blk.1.attn_{part}.weight"] for part in "kv")
    assert (k.shape, k.kind) == (v.shape, v.kind)
    data = bytearray(path.read_bytes())
    keys, values = (data[t.start : t.start + t.nbytes] for t in (k, v))
    data[k.start : k.start + k.nbytes] = values
    data[v.start : v.start + v.nbytes] = keys
    path.write_bytes(data)
    assert verify(path).findings == ()
    found = {f.where for f in verify(path, wide).findings if f.severity == "error"}
    assert found == {f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv"}


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
