"""`quantize export`: options reach the export, standard output holds only the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.export import export
from lowbit.quantize.gguf.reader import GGUFFile
from typer.testing import CliRunner, Result

from .gguf_models import tiny_llama
from .runtime_models import quantize_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


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
