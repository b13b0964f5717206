"""Conversions: the same numbers and, going round, the same bytes; refused or measured otherwise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.evals.speed import peak_memory
from lowbit.kernels.errors import UserError
from lowbit.quantize import convert
from lowbit.quantize.checkpoint.kv_config import read_kv_storage
from lowbit.quantize.checkpoint.layouts import LAYOUTS, NATIVE
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.checkpoint.manifest import check_manifest, read_manifest
from lowbit.quantize.passes.settings import GPTQSettings, KVCacheSettings
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.recipe import Calibration, KVCachePass, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.quantize.spec import Group, scheme_from_name
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .command import Commands
from .models import change_json, change_tensors, copied
from .published_layouts import gptq_quantization, gptq_tensors, grid_of, write_checkpoint
from .runtime_models import FAMILIES, save_tiny

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in bfloat16. Not to be changed."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "bf16", FAMILIES["llama"]())
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {n: t.bfloat16() for n, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    change_json(folder / "config.json", lambda c: c.update(dtype="bfloat16"))
    (folder / "NOTICE").write_text("rides along\n")
    return folder


@pytest.fixture(scope="module")
def made(model: Path, story: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of several schemes and layouts by name. Not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    text = Calibration(str(story), 4, 32)

    def rounded(scheme: str, **more: Any) -> WeightPass:
        return WeightPass(method="rtn", scheme=scheme, **more)

    desc_act = WeightPass(scheme="W4A16", gptq=GPTQSettings(act_order="desc_act"))
    cache = KVCachePass(kv_cache=KVCacheSettings(format="fp8"))
    recipes = {
        "W4": Recipe((rounded("W4A16"),)),
        "W4 asym": Recipe((rounded("W4A16_ASYM"),)),
        "W3 asym": Recipe((rounded("W3A16_ASYM"),)),
        "W5": Recipe((rounded("W5A16"),)),
        "W8 channel": Recipe((rounded("W8A16"),)),
        "W8A8": Recipe((rounded("W8A8"),)),
        "FP8_BLOCK": Recipe((rounded("FP8_BLOCK"),)),
        "NVFP4": Recipe((rounded("NVFP4A16"),)),
        "mixed": Recipe(
            (
                rounded("W4A16", group_size=64, targets=("re:.*self_attn",)),
                rounded("W4A16_ASYM", group_size=32, targets=("re:.*mlp",)),
            )
        ),
        "mixed bits": Recipe(
            (
                rounded("W4A16", group_size=32, targets=("re:.*self_attn",)),
                rounded("W8A16", group_size=32, targets=("re:.*mlp",)),
            )
        ),
        "desc_act": Recipe((desc_act,), text, format="gptq"),
        "cache": Recipe((rounded("W4A16"), cache), text),
    }
    for name, recipe in recipes.items():
        quantize_model(model, folder / name, recipe)
    return {name: folder / name for name in recipes}


def values(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    return {m: checkpoint.dense_weight(m) for m in checkpoint.schemes}


def assert_same_values(one: Path, other: Path) -> None:
    a, b = values(one), values(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[m], b[m]) for m in a)


def assert_same_tensors(one: Path, other: Path) -> None:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name
    configs = [json.loads((f / "config.json").read_text()) for f in (one, other)]
    assert configs[0] == configs[1]


# source -> layouts that it goes through
CHAINS = {
    "W4": ["gptq", "gptq_v2", "compressed-tensors"],
    "W4 asym": ["awq", "gptq_v2", "compressed-tensors"],
    "W3 asym": ["gptq_v2", "compressed-tensors"],
    "W8 channel": ["gptq_v2", "gptq", "compressed-tensors"],
    "FP8_BLOCK": ["fp8", "compressed-tensors"],
    "mixed": ["gptq_v2", "compressed-tensors"],
    "mixed bits": ["gptq", "gptq_v2", "compressed-tensors"],
}


@pytest.mark.parametrize("source", CHAINS)
def test_chains_end_in_the_same_bytes(source: str, made: dict[str, Path], tmp_path: Path) -> None:
    folder = made[source]
    for step, to in enumerate(CHAINS[source]):
        result = convert(folder, tmp_path / f"{step}-{to}", to)
        assert (result.exact, result.relative_error, result.losses) == (True, {}, {})
        assert (result.linears, result.target_format) == (14, to)
        folder = result.out
        assert_same_values(folder, made[source])
        layout = Checkpoint(folder).layout
        assert layout is not None
        assert layout.name == to
    assert_same_tensors(folder, made[source])


def test_awq_and_back_to_awq(made: dict[str, Path], tmp_path: Path) -> None:
    first = convert(made["W4 asym"], tmp_path / "awq", "awq").out
    middle = convert(first, tmp_path / "gptq", "gptq_v2").out
    last = convert(middle, tmp_path / "again", "awq").out
    assert (last / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_columns_out_of_order_stay_so(made: dict[str, Path], tmp_path: Path) -> None:
    there = convert(made["desc_act"], tmp_path / "v2", "gptq_v2").out
    back = convert(there, tmp_path / "v1", "gptq").out
    assert Checkpoint(there).config["quantization_config"]["desc_act"] is True
    assert_same_tensors(back, made["desc_act"])


def test_dequantized_tensors_load_anywhere(made: dict[str, Path], tmp_path: Path) -> None:
    for source in ("W3 asym", "NVFP4", "desc_act", "FP8_BLOCK"):
        out = convert(made[source], tmp_path / source, "plain").out
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        stored = load_file(out / "model.safetensors")
        for module, value in values(made[source]).items():
            assert torch.equal(stored[f"{module}.weight"], value.bfloat16())
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
        assert torch.equal(plain.get_submodule(DOWN).weight, stored[f"{DOWN}.weight"])


def test_narrow_codes_fit_in_wider_ones(made: dict[str, Path], tmp_path: Path) -> None:
    result = convert(made["W3 asym"], tmp_path / "awq", "awq")
    assert result.exact
    assert result.notes == ["14 linears of 3 bits are held in 4"]
    assert_same_values(result.out, made["W3 asym"])
    result = convert(made["W5"], tmp_path / "gptq", "gptq")
    assert (result.exact, result.notes) == (True, ["14 linears of 5 bits are held in 8"])
    assert_same_values(result.out, made["W5"])


def test_groups_are_split_where_one_size_is_asked_for(
    made: dict[str, Path], tmp_path: Path
) -> None:
    result = convert(made["mixed"], tmp_path / "awq", "awq")
    assert result.exact
    assert_same_values(result.out, made["mixed"])
    granularities = {s.weights.granularity for s in Checkpoint(result.out).schemes.values()}
    assert granularities == {Group(32)}


REFUSED = {  # source, target -> what the message names
    ("W8A8", "gptq"): "how inputs are quantized",
    ("W8 channel", "awq"): "awq holds whole numbers of 4 bits",
    ("W4", "fp8"): "fp8 holds 8-bit floats",
    ("NVFP4", "gptq_v2"): "whole numbers",
    ("desc_act", "compressed-tensors"): "g_idx",
    ("desc_act", "awq"): "g_idx",
    ("mixed bits", "awq"): "4 bits",
}


@pytest.mark.parametrize(("source", "to"), REFUSED)
def test_what_does_not_fit_is_refused_or_measured(
    source: str, to: str, made: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"'model\.layers.*{REFUSED[source, to]}.*--requantize"):
        convert(made[source], tmp_path / "out", to)
    assert not list(tmp_path.iterdir())
    result = convert(made[source], tmp_path / "out", to, requantize=True)
    assert not result.exact
    assert any(REFUSED[source, to] in why for why in result.losses.values())
    before, after = values(made[source]), values(result.out)
    error = {m: float((after[m] - before[m]).norm() / before[m].norm()) for m in before}
    assert result.relative_error == pytest.approx({m: e for m, e in error.items() if e > 0})
    if result.worst is not None:
        assert result.worst == max(result.relative_error.items(), key=lambda item: item[1])
    report = json.loads((result.out / "quantization_report.json").read_text())
    assert report["relative_error"] == result.relative_error


def test_inputs_that_are_no_longer_quantized_leave_the_weights(
    made: dict[str, Path], tmp_path: Path
) -> None:
    result = convert(made["W8A8"], tmp_path / "out", "gptq", requantize=True)
    assert result.relative_error == {}
    assert result.notes == ["inputs are no longer quantized by 14 linears"]
    assert_same_values(result.out, made["W8A8"])
    schemes = set(Checkpoint(result.out).schemes.values())
    assert schemes == {scheme_from_name("W8A16")}


def test_a_zero_of_0_has_no_place_in_version_1(made: dict[str, Path], tmp_path: Path) -> None:
    folder = convert(made["W4 asym"], tmp_path / "v2", "gptq_v2").out
    change_tensors(folder, lambda t: t[f"{DOWN}.qzeros"].bitwise_and_(-16))
    with pytest.raises(UserError, match=f"'{DOWN}' has zero-points of 0.*choose gptq_v2"):
        convert(folder, tmp_path / "v1", "gptq")
    assert [p.name for p in tmp_path.iterdir()] == ["v2"]
    assert convert(folder, tmp_path / "ct", "compressed-tensors").exact


def test_scales_that_float16_does_not_hold(made: dict[str, Path], tmp_path: Path) -> None:
    folder, name = copied(made["W4"], tmp_path / "tiny scales"), f"{DOWN}.weight_scale"
    change_tensors(folder, lambda t: t[name].mul_(2.0**-14))
    with pytest.raises(UserError, match=f"'{DOWN}'.*do not survive float16"):
        convert(folder, tmp_path / "out", "gptq")
    result = convert(folder, tmp_path / "out", "gptq", requantize=True)
    assert set(result.relative_error) == set(result.losses) == {DOWN}
    assert 0 < result.relative_error[DOWN] < 0.05
    other, same = values(folder), values(result.out)
    assert all(torch.equal(other[m], same[m]) for m in other if m != DOWN)


def test_scales_finer_than_the_models_dtype_stay_as_they_are(model: Path, tmp_path: Path) -> None:
    """Scales of a float16 grid beside a bfloat16 model, as GPTQModel leaves them."""
    write_checkpoint(
        model, tmp_path / "gptq", gptq_quantization(4, 32, False),
        lambda w: grid_of(w.float(), 4, 32, False), lambda m, g: gptq_tensors(m, g, 4, 1),
    )  # fmt: skip
    result = convert(tmp_path / "gptq", tmp_path / "ct", "compressed-tensors")
    assert result.exact
    assert_same_values(result.out, tmp_path / "gptq")
    info = Checkpoint(result.out).shards.info[f"{DOWN}.weight_scale"]
    assert info.dtype == torch.float16


def test_a_wrong_label_is_put_right(model: Path, tmp_path: Path) -> None:
    write_checkpoint(
        model, tmp_path / "gptq", gptq_quantization(4, 32, True),
        lambda w: grid_of(w.float(), 4, 32, True), lambda m, g: gptq_tensors(m, g, 4, 2),
    )  # fmt: skip
    said: list[str] = []
    result = convert(tmp_path / "gptq", tmp_path / "out", "gptq_v2", say=said.append)
    assert [w for w in result.warnings if "read as gptq_v2" in w] == said
    assert result.source_format == "gptq_v2"
    again = Checkpoint(result.out)
    assert again.warnings == []
    assert again.config["quantization_config"]["checkpoint_format"] == "gptq_v2"


def test_everything_else_rides_along(made: dict[str, Path], tmp_path: Path) -> None:
    result = convert(made["cache"], tmp_path / "gptq", "gptq", max_shard_size="20KB")
    out, original = Checkpoint(result.out), Checkpoint(made["cache"])
    for name in ("NOTICE", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (result.out / name).read_bytes() == (made["cache"] / name).read_bytes()
    linears = {n for m in original.schemes for n in original.stored_names(m)}
    for name in set(original.shards.names()) - linears:
        assert torch.equal(out.shards.get(name), original.shards.get(name))
    stored = [read_kv_storage(c.config, c.shards) for c in (out, original)]
    assert stored[0] == stored[1] is not None
    assert len(list(result.out.glob("model-*-of-*.safetensors"))) > 2
    manifest = read_manifest(result.out)
    assert manifest is not None
    assert check_manifest(result.out, manifest) == []
    back = convert(result.out, tmp_path / "ct", "compressed-tensors").out
    assert not (back / "quantize_config.json").exists()
    assert_same_tensors(back, made["cache"])


@pytest.mark.parametrize("to", [*LAYOUTS, "plain"])
def test_a_model_that_is_not_quantized_is_refused(to: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no quantized linears.*quantize run"):
        convert(model, tmp_path / "out", to)


def test_the_command(made: dict[str, Path], command: Commands, tmp_path: Path) -> None:
    folder = copied(made["W4 asym"], tmp_path / "w4")
    outcome = command("convert", folder, "--to", "awq", "--json")
    assert outcome.code == 0, outcome.stderr
    told = json.loads(outcome.stdout)
    assert (told["exact"], told["linears"], told["out"]) == (True, 14, f"{folder}-awq")
    command("convert", folder, "--to", "awq").refuses("w4-awq exists", "--overwrite")
    command("convert", folder, "--to", "awqq").refuses("unknown format 'awqq'", "'awq'")
    command("convert", folder, "--to", "gguf").refuses("quantize export")
    command("convert", folder, "--to", "fp8", "-o", tmp_path / "fp8").refuses("--requantize")
    lossy = command("convert", folder, "--to", "fp8", "-o", tmp_path / "fp8", "--requantize")
    assert "relative weight error: mean" in lossy.stderr
    assert "14 linears: fp8 holds 8-bit floats" in lossy.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a peak is measured anew through /proc")
def test_one_linear_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """96 MB of tensors, converted in a third of that."""
    monkeypatch.setattr("lowbit.calib.shards.MAPPED_BYTES", 1 << 22)
    scheme = scheme_from_name("W4A16_ASYM")
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.zeros(24 * 1024, 1024).bfloat16()}
    for n in range(40):
        codes = torch.randint(-8, 8, (1024, 2048), generator=generator).to(torch.int8)
        scale, zero = torch.ones(1024, 16).bfloat16(), torch.zeros(1024, 16, dtype=torch.int8)
        module, q = f"model.layers.{n}.mlp.up_proj", Quantized(codes, scale, zero, scheme.weights)
        tensors |= NATIVE.compress(module, q, scheme)
    (tmp_path / "ct").mkdir()
    save_file(tensors, tmp_path / "ct" / "model.safetensors", metadata={"format": "pt"})
    schemes = {n.removesuffix(".weight_scale"): scheme for n in tensors if n.endswith("scale")}
    config = {"model_type": "llama", "quantization_config": NATIVE.config(schemes, [], "0")}
    (tmp_path / "ct" / "config.json").write_text(json.dumps(config))
    del tensors
    convert(tmp_path / "ct", tmp_path / "warm", "awq")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    convert(tmp_path / "ct", tmp_path / "awq", "awq")
    assert peak_memory() - resident < 24 << 20
