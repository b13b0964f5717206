"""`quantize eval`: options reach the protocol, standard output holds the result alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from lowbit.calib.text import load_text, load_tokenizer
from lowbit.evals.measure import measure_models
from lowbit.evals.windows import Windowing
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.eval import evaluate
from typer.testing import CliRunner

SMALL = ["--ctx", "64", "--windows", "2"]


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained model to measure")
    return Path(folder)


@pytest.fixture(scope="module")
def story(data: Path) -> str:
    return str(data / "text" / "tinystories_valid.txt")


def run(*arguments: str) -> Any:
    """The command's result; a UserError is raised, as `quantize` itself will catch it."""
    app = typer.Typer()
    app.command()(evaluate)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_json_is_one_object_and_says_what_was_asked(data: Path, story: str) -> None:
    model, base = str(data / "stories260k-ffn192"), str(data / "stories260k")
    options = [*SMALL, "--stride", "32", "--bos", "each", "--dtype", "float32", "--device", "cpu"]
    result = run(model, "--base", base, "--text", story, *options, "--json")
    got = json.loads(result.stdout)
    assert got["protocol"]["windowing"] == {
        "ctx": 64,
        "stride": 32,
        "bos": "each",
        "windows": 2,
        "skip": 0,
        "predictive": False,
        "tail": False,
        "special": False,
    }
    assert got["protocol"]["text_sha256"] == load_text(story, "evaluation").sha256
    assert [(row["name"], row["path"]) for row in got["rows"]] == [("base", base), ("model", model)]
    padded = got["rows"][1]["divergence"]  # the same function: its MLP is padded by zeros
    assert padded["kld_mean"] < 1e-6 and padded["top1"] == 1.0
    assert "text: the file tinystories_valid.txt" in result.stderr


def test_the_command_measures_what_the_library_does(data: Path, story: str, tmp_path: Path) -> None:
    folder = data / "stories260k"
    file = tmp_path / "report.json"
    result = run(str(folder), "--text", story, *SMALL, "--report", str(file))
    text = load_text(story, "evaluation", load_tokenizer(folder))
    want = measure_models({"model": folder}, text, Windowing(64, 64, windows=2)).rows[0]
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["rows"][0]["perplexity"] == want.perplexity._asdict()
    assert f"{want.perplexity.perplexity:.3f} ±" in result.stdout
    assert f"sha256 {text.sha256}" in result.stdout
    assert f"wrote {file}: quantize report makes a page of it" in result.stderr
    words = " ".join(written["definitions"])
    assert "perplexity:" in words and "bits per weight:" in words
    for absent in ("KLD", "noise floor", "top-1", "decode:", "RMS"):
        assert absent not in words and f"- {absent}" not in result.stdout, "not measured"


def test_defaults_follow_the_model_and_the_text(data: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time there was a cat. " * 150, encoding="utf-8")
    got = json.loads(run(str(data / "stories260k"), "--text", str(short), "--json").stdout)
    assert got["protocol"]["windowing"] == {
        "ctx": 512,
        "stride": 512,
        "bos": "none",
        "windows": 10,
        "skip": 0,
        "predictive": False,
        "tail": False,
        "special": False,
    }
    tokens = len(load_tokenizer(data / "stories260k").tokenize(short.read_text()))
    assert 0 < got["protocol"]["windows"] == tokens // 512 < 10


def test_windows_zero_means_all(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Once upon a time there was a cat. " * 60, encoding="utf-8")
    options = ["--ctx", "32", "--windows", "0", "--json"]
    got = json.loads(run(str(data / "stories260k"), "--text", str(file), *options).stdout)
    tokens = len(load_tokenizer(data / "stories260k").tokenize(file.read_text()))
    assert got["protocol"]["windows"] == tokens // 32 > 10


@pytest.mark.parametrize("worth", [0.0, 1e9])
def test_a_long_pass_says_what_it_will_take(
    data: Path, story: str, monkeypatch: pytest.MonkeyPatch, worth: float
) -> None:
    monkeypatch.setattr("lowbit.evals.measure.WORTH_SAYING", worth)
    options = ["--ctx", "64", "--windows", "5"]
    said = run(str(data / "stories260k"), "--text", story, *options).stderr
    assert ("seconds for the other 3 windows" in said) == (worth == 0)


def test_speed_is_timed_on_request(data: Path, story: str) -> None:
    row = json.loads(
        run(str(data / "stories260k"), "--text", story, *SMALL, "--speed", "--json").stdout
    )["rows"][0]
    assert row["speed"]["prompt_tokens"] == 64 and row["speed"]["decode"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ctx", "513"], "ctx 513 exceeds the 512 positions"),
        (["--ctx", "64", "--stride", "65"], "stride must be from 1 to ctx = 64, got 65"),
        (["--windows", "-1"], "--windows must be 0"),
        (["--bos", "always"], "bos must be one of none, first, each, got 'always'"),
        (["--dtype", "int4"], "dtype must be auto or one of"),
        (["--device", "abacus"], "device 'abacus'"),
        (["--report", "report.pdf"], "FILE.md or FILE.json"),
        (["--report", "absent/report.md"], "no such folder for the report"),
        (["--text", "absent.txt"], "no text file 'absent.txt'"),
        (["--base", "absent-folder"], "no such model folder: absent-folder"),
    ],
)
def test_mistakes_are_named(data: Path, story: str, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(str(data / "stories260k"), "--text", story, *options)


def test_a_text_shorter_than_a_window_is_refused(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("Once upon a time.", encoding="utf-8")
    with pytest.raises(UserError, match=r"holds \d+ tokens, fewer than one window of ctx = 512"):
        run(str(data / "stories260k"), "--text", str(file))


def test_the_help_shows_an_example_and_every_option() -> None:
    app = typer.Typer()
    app.command()(evaluate)
    help_text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "quantize eval ./smollm2-w4 --base" in help_text
    for name in ("base", "text", "ctx", "stride", "windows", "bos", "dtype", "device", "json"):
        assert f"--{name}" in help_text
