"""`quantize export`: options reach the export, standard output holds only the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.export import export
from lowbit.quantize.gguf.as_folder import folder_of
from lowbit.quantize.gguf.reader import GGUFFile
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from .gguf_models import tiny_llama
from .runtime_models import quantize_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


@torch.inference_mode()
def of_tokens(folder: Path) -> torch.Tensor:
    """The logits of a model folder for a few tokens, float32 [1, 6, vocabulary]."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded(torch.tensor([[1, 5, 9, 30, 7, 2]])).logits


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(export)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_every_option(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    options = ["--to", "gguf", "--type", "q5_0", "--pre", "smollm", "--json"]
    result = run(model, "-o", out, *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["file_type"] == "Q5_0"
    assert report["nbytes"] == out.stat().st_size
    keys = GGUFFile(out).keys
    assert (keys["general.file_type"], keys["tokenizer.ggml.pre"]) == (8, "smollm")
    assert isinstance(run(model, "-o", out).exception, UserError)
    assert run(model, "-o", out, "--overwrite").exit_code == 0
    assert GGUFFile(out).keys["general.file_type"] == 7  # Q8_0 unless told otherwise


def test_an_input_is_not_written_over(model: Path, tmp_path: Path) -> None:
    source, weights = tmp_path / "m.gguf", tmp_path / "w.gguf"
    assert run(model, "-o", source, "--type", "F16").exit_code == 0
    weights.write_bytes(b"an importance matrix")
    before = {path: path.read_bytes() for path in (source, weights, model / "config.json")}
    for arguments in [
        (source, "-o", source),
        (model, "-o", model / "config.json"),
        (model, "-o", weights, "--imatrix", weights),
        (tmp_path / "m-00001-of-00002.gguf", "-o", source),
    ]:
        if not arguments[0].exists():
            source.rename(arguments[0])
            before[arguments[0]] = before.pop(source)
        result = run(*arguments, "--overwrite")
        assert isinstance(result.exception, UserError), arguments
        assert "would be written over the input" in str(result.exception)
    assert all(path.read_bytes() == held for path, held in before.items())
    inside = model / "made.gguf"
    assert run(model, "-o", inside).exit_code == run(model, "-o", inside, "--overwrite").exit_code
    inside.unlink()


def test_a_rotated_model_is_the_same_model_in_the_file(model: Path, tmp_path: Path) -> None:
    """Its greedy tokens are those of the file without; nothing else is left beside it."""
    calib = tmp_path / "some.txt"
    calib.write_text("the thin tin then in a thing, and a hat in the bin " * 40)
    data = ["--calib", calib, "--samples", "4", "--seq-len", "32"]
    plain, turned = tmp_path / "plain.gguf", tmp_path / "turned.gguf"
    assert run(model, "-o", plain, "--type", "F32").exit_code == 0
    result = run(model, "-o", turned, "--type", "F32", "--rotate")
    assert result.exit_code == 0, result.output
    assert "rotated by R1" in result.stderr
    before, after = GGUFFile(plain), GGUFFile(turned)
    assert after.keys["general.name"] == before.keys["general.name"] == model.name
    assert set(after.tensors) == {*before.tensors, "output.weight"}, "the head is tied no more"
    logits = [of_tokens(folder_of(path, print, tmp_path / "cache")) for path in (plain, turned)]
    assert (logits[1] - logits[0]).norm() < 1e-4 * logits[0].norm()
    q4 = tmp_path / "q4.gguf"
    options = ["--type", "Q4_0", "--rotate", "--method", "gptq", "--imatrix", "auto", *data]
    assert run(model, "-o", q4, *options).exit_code == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"some.txt", "plain.gguf", "turned.gguf", "q4.gguf", "cache"}


def test_what_is_not_rotated(model: Path, tmp_path: Path) -> None:
    out, weights = tmp_path / "m.gguf", tmp_path / "w.dat"
    weights.write_bytes(b"an importance matrix")
    checkpoint = quantize_folder(model, tmp_path / "w4", "W4A16", 32)
    for arguments, word in [
        ((model, "--imatrix", weights), "--imatrix auto"),
        ((checkpoint,), "quantized already"),
    ]:
        error = run(*arguments, "-o", out, "--rotate").exception
        assert isinstance(error, UserError) and word in str(error)
    out.write_bytes(b"mine")
    assert "exists" in str(run(model, "-o", out, "--rotate").exception)
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "w.dat", "w4"}


def test_summary_for_people(model: Path, tmp_path: Path) -> None:
    checkpoint = quantize_folder(model, tmp_path / "w4", "W4A16", 32)
    result = run(checkpoint, "-o", tmp_path / "m.gguf", "--type", "Q4_0")
    assert result.exit_code == 0, result.output
    assert "Q4_0" in result.stdout
    assert "without a second rounding: 14 layers" in result.stdout
    asymmetric = quantize_folder(model, tmp_path / "asym", "W4A16_ASYM", 32)
    result = run(asymmetric, "-o", tmp_path / "a.gguf", "--type", "Q4_0")
    assert "rounded a second time" in result.stdout


def test_refusals(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    for arguments, word in [
        ((model, "-o", out, "--to", "onnx"), "onnx"),
        ((model, "-o", out, "--type", "Q4_K_X"), "Q4_K_X"),
        ((model, "-o", out, "--tensor-type", "ffn_down"), "PATTERN=TYPE"),
        ((model, "-o", out, "--tensor-type", "ffn_dwn=Q6_K"), "ffn_dwn"),
        ((model, "-o", out, "--imatrix", "absent.dat"), "absent.dat"),
        ((tmp_path / "absent", "-o", out), "absent"),
    ]:
        error = run(*arguments).exception
        assert isinstance(error, UserError)
        assert word in str(error)
    assert not out.exists()
