"""GGUF files where a model is taken: inspect, eval, generate, run; the folder behind a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from lowbit.calib.source import model_folder
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.cli.common import model_path
from lowbit.quantize.cli.eval import evaluate
from lowbit.quantize.cli.export import export
from lowbit.quantize.cli.generate import generate
from lowbit.quantize.cli.inspect import inspect
from lowbit.quantize.cli.run import run
from lowbit.quantize.gguf import as_folder
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.reader import GGUFFile
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from .gguf_models import tiny_llama

TEXT = "the thing in 33 the thin in the inn " * 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model by file type."""
    folder = tmp_path_factory.mktemp("gguf")
    for kind in ("F32", "Q4_0"):
        export_gguf(model, folder / f"{kind}.gguf", kind, progress=False)
    return {kind: folder / f"{kind}.gguf" for kind in ("F32", "Q4_0")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lowbit" / "gguf"


def invoke(command: Callable[..., None], *arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_inspect_shows_metadata_types_and_bits(files: dict[str, Path]) -> None:
    found = json.loads(invoke(inspect, files["Q4_0"], "--json").stdout)
    file = GGUFFile(files["Q4_0"])
    assert found["metadata"]["llama.block_count"] == 2
    assert found["metadata"]["tokenizer.ggml.tokens"] == "288 entries"
    assert found["file_bytes"] == files["Q4_0"].stat().st_size
    assert found["tensor_bytes"] == sum(t.nbytes for t in file.tensors.values())
    assert found["bits_per_weight"] == 8 * found["tensor_bytes"] / found["weights"]
    assert found["types"]["Q4_0"]["nbytes"] * 8 == found["types"]["Q4_0"]["weights"] * 4.5
    assert found["tensors"]["blk.0.attn_q.weight"] == {"type": "Q4_0", "shape": [64, 64]}
    shown = invoke(inspect, files["Q4_0"], "--all").stdout
    for words in ("general.architecture", "Q4_0", "blk.1.ffn_down.weight", "bits per weight"):
        assert words in shown


def test_eval_measures_the_file(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """Against its base: nothing lost in float32, something in Q4_0, sizes those of the file."""
    (tmp_path / "text.txt").write_text(TEXT)
    rows: dict[str, Any] = {}
    for kind, path in files.items():
        options = ["--text", tmp_path / "text.txt", "--windows", "2", "--ctx", "64", "--json"]
        report = json.loads(invoke(evaluate, path, "--base", model, *options).stdout)
        rows[kind] = next(row for row in report["rows"] if row["name"] == "model")
        assert rows[kind]["path"] == str(path)
        assert rows[kind]["size"]["file_bytes"] == path.stat().st_size
    assert rows["F32"]["divergence"]["kld_mean"] == pytest.approx(0, abs=1e-6)
    assert rows["Q4_0"]["divergence"]["kld_mean"] > 1e-3
    contents = as_folder.contents(GGUFFile(files["Q4_0"]))
    assert rows["Q4_0"]["size"]["bits_per_weight"] == pytest.approx(contents.bits_per_weight)


def test_generate_runs_the_file(model: Path, files: dict[str, Path]) -> None:
    options = ["the thing", "--max-tokens", "6", "--ignore-eos", "--json", "--no-chat"]
    ours, expected = (
        json.loads(invoke(generate, source, *options).stdout) for source in (files["F32"], model)
    )
    assert ours["prompt_token_ids"] == expected["prompt_token_ids"]
    assert ours["token_ids"] == expected["token_ids"]


def test_run_quantizes_the_file(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "w8"
    invoke(run, files["Q4_0"], "-o", out, "--scheme", "W8A16", "--method", "rtn")
    checkpoint = Checkpoint(out)
    assert len(checkpoint.schemes) == 14
    assert not (out / as_folder.NOTE).exists()
    module = "model.layers.0.mlp.up_proj"
    stored = GGUFFile(files["Q4_0"]).get("blk.0.ffn_up.weight")
    torch.testing.assert_close(checkpoint.dense_weight(module), stored, rtol=0, atol=0.01)


def test_export_makes_another_type_of_the_file(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    invoke(export, files["F32"], "-o", tmp_path / "q.gguf", "--type", "Q4_0")
    made, direct = GGUFFile(tmp_path / "q.gguf"), GGUFFile(files["Q4_0"])
    assert made.keys["general.name"] == "F32"
    assert {**made.keys, "general.name": direct.keys["general.name"]} == direct.keys
    assert all(torch.equal(made.get(n), direct.get(n)) for n in direct.tensors)


def test_the_folder_is_made_once_and_anew_for_another_file(
    files: dict[str, Path], tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(files["Q4_0"].read_bytes())
    said: list[str] = []
    folder = as_folder.folder_of(path, said.append)
    assert folder.parent == cache
    assert as_folder.folder_of(path, said.append) == folder
    assert len(said) == 1
    assert as_folder.contents_behind(folder) == as_folder.contents(GGUFFile(path))
    os.utime(path, ns=(1, 1))
    assert as_folder.folder_of(path, said.append) != folder
    assert as_folder.contents_behind(tmp_path) is None


def test_values_are_kept_as_they_are(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """Blocks in float32, halves as halves, norms in float32."""
    export_gguf(model, tmp_path / "half.gguf", "BF16", progress=False)
    folder = as_folder.folder_of(tmp_path / "half.gguf", str)
    weights = load_file(folder / "model.safetensors")
    assert weights["lm_head.weight"].dtype == torch.bfloat16
    assert weights["model.norm.weight"].dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    folder = as_folder.folder_of(files["Q4_0"], str)
    weights = load_file(folder / "model.safetensors")
    expected = GGUFFile(files["Q4_0"]).get("blk.0.ffn_down.weight")
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], expected)


def test_a_cache_that_cannot_be_written_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        as_folder.folder_of(files["F32"], str, tmp_path / "file")


def test_what_is_no_gguf_file_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files["F32"].read_bytes()[:5000])
    with pytest.raises(UserError, match="damaged or no GGUF file"):
        model_path(str(cut))
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(UserError, match="is a file"):
        model_path(str(tmp_path / "x.txt"))
    assert model_path(str(tmp_path)) == model_folder(str(tmp_path)) == tmp_path
