"""`quantize run` and `quantize inspect`: results on standard output, notes on standard error."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from lowbit.calib.shards import INDEX, Shards
from lowbit.evals.results import check_results
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.checkpoint.raw import raw_tensors, write_shards
from lowbit.quantize.recipe import Recipe
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .command import Commands
from .models import hashes


def same_tensors(a: Path, b: Path) -> bool:
    one, other = Shards(a), Shards(b)
    assert set(one.names()) == set(other.names())
    return all(torch.equal(one.get(name), other.get(name)) for name in one.names())


def test_run_prints_one_json_object(
    tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    outcome = command("run", tiny, "-o", out, *calibration, "--json", "--group-size", "32")
    result = json.loads(outcome.stdout)
    assert result["out"] == str(out)
    assert result["dtype"] == "float32"
    assert len(result["relative_error"]) == 6 * 7
    assert 0 < max(result["relative_error"].values()) < 0.05
    assert Recipe.from_dict(result["recipe"]).passes[0].group_size == 32
    assert "calibration: the file story.txt" in outcome.stderr
    check_results(result, "the command's output")
    (row,) = result["rows"]
    assert (row["made"]["scheme"], row["made"]["method"]) == ("W4A16", "gptq")
    assert {r["name"]: r["relative_error"] for r in row["linears"]} == result["relative_error"]
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["recipe"] == result["recipe"]
    assert report["linears"].keys() == result["relative_error"].keys()


def test_run_prints_no_result_where_none_was_asked_for(
    tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    outcome = command("run", tiny, "-o", tmp_path / "out", *calibration)
    assert outcome.code == 0
    assert outcome.stdout == ""
    assert "group size 32: 128 does not divide the 64 input columns" in outcome.stderr
    assert f"wrote {tmp_path / 'out'}" in outcome.stderr


def test_a_text_that_nobody_reads_is_said_to_be_unread(
    tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    outcome = command("run", tiny, "-o", tmp_path / "out", *calibration, "--method", "rtn")
    assert "rtn needs no data: the calibration text '" in outcome.stderr
    quiet = command("run", tiny, "-o", tmp_path / "quiet", "--method", "rtn")
    assert quiet.code == 0 and "needs no data" not in quiet.stderr


def test_the_dumped_recipe_is_what_runs(
    tiny: Path, calibration: list[str], packed: Path, command: Commands, tmp_path: Path
) -> None:
    dumped = command("run", tiny, "-o", tmp_path / "no", *calibration, "--dump-recipe")
    assert dumped.code == 0 and not (tmp_path / "no").exists()
    file = tmp_path / "recipe.yaml"
    file.write_text(dumped.stdout)
    out = tmp_path / "out"
    assert command("run", tiny, "-o", out, "--recipe", file).code == 0
    assert hashes(out) == hashes(packed)


def test_rows_are_drawn_by_the_seed(
    tiny: Path, calibration: list[str], packed: Path, command: Commands, tmp_path: Path
) -> None:
    weights = [hashes(packed)["model.safetensors"]]
    for i, options in enumerate((["--seed", "1"], ["--seed", "1"], ["--seed", "2"])):
        out = tmp_path / str(i)
        assert command("run", tiny, "-o", out, *calibration, "--shuffle", *options).code == 0
        weights.append(hashes(out)["model.safetensors"])
    assert weights[1] == weights[2]
    assert len(set(weights)) == 3


def test_targets_and_ignore_rules(
    tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    rules = ["--targets", "re:.*mlp.*", "--targets", "model.layers.0.self_attn.q_proj"]
    rules += ["--ignore", "re:.*layers.5.*"]
    assert command("run", tiny, "-o", out, *calibration, *rules).code == 0
    expected = {f"model.layers.{i}.mlp.{p}_proj" for i in range(5) for p in ("gate", "up", "down")}
    assert set(Checkpoint(out).schemes) == {*expected, "model.layers.0.self_attn.q_proj"}


def test_a_sharded_model_is_read_alike(
    tiny: Path, calibration: list[str], packed: Path, command: Commands, tmp_path: Path
) -> None:
    sharded = tmp_path / "sharded"
    shutil.copytree(tiny, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(sharded, max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    out = tmp_path / "out"
    assert command("run", sharded, "-o", out, *calibration).code == 0
    assert same_tensors(out, packed)
    assert not (out / INDEX).exists()


def test_output_is_sharded_by_size(packed: Path, tmp_path: Path) -> None:
    tensors = raw_tensors(packed / "model.safetensors")
    total = write_shards(tmp_path, tensors, max_shard_bytes=100_000).tensor_bytes
    assert total == sum(t.nbytes for t in tensors)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) >= total / 100_000
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == total
    for file in files:
        assert set(load_file(file)) == {n for n, f in index["weight_map"].items() if f == file.name}
    assert same_tensors(tmp_path, packed)


def test_inspect_counts_every_bit(tiny: Path, packed: Path, command: Commands) -> None:
    facts = json.loads(command("inspect", packed, "--json").stdout)
    tensors = load_file(packed / "model.safetensors")
    original = load_file(tiny / "model.safetensors")
    assert facts["modules"] == dict.fromkeys(
        Checkpoint(packed).schemes, "int4 symmetric, Group(size=32)"
    )
    assert facts["schemes"] == {"int4 symmetric, Group(size=32)": 6 * 7}
    size = facts["size"]
    assert size["weights"] == sum(math.prod(t.shape) for t in original.values())
    assert size["tensor_bytes"] == sum(t.nbytes for t in tensors.values())
    assert size["bits_per_weight"] == 8 * size["tensor_bytes"] / size["weights"]
    codes = sum(t.nbytes for n, t in tensors.items() if n not in original)
    linears = sum(original[f"{name}.weight"].numel() for name in facts["modules"])
    assert size["quantized_weights"] == linears
    assert size["quantized_bits_per_weight"] == 8 * codes / linears
    assert 5 < size["quantized_bits_per_weight"] < 5.1  # 4, a float32 scale per 32, shapes


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_inspect_prints_a_table(options: list[str], packed: Path, command: Commands) -> None:
    outcome = command("inspect", packed, *options)
    assert outcome.code == 0 and outcome.stderr == ""
    assert "42 linears: int4 symmetric" in outcome.stdout
    assert ("model.layers.3.mlp.down_proj" in outcome.stdout) == bool(options)


def test_inspect_takes_originals(tiny: Path, command: Commands) -> None:
    facts = json.loads(command("inspect", tiny, "--json").stdout)
    assert facts["modules"] == {} and facts["size"]["bits_per_weight"] == 32
    assert facts["layers"] == 6 and facts["unquantized_tensors"] == {"float32": 6 * 9 + 2}
