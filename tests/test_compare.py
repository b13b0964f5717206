"""`quantize compare`: an estimate first, nothing twice, and a recommendation by what is wanted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from lowbit.evals import comparison_estimate, matrix_study
from lowbit.evals.comparison import GGUF_METHODS, Candidate, gguf_candidate, settings_of
from lowbit.evals.comparison_estimate import estimate, start_seconds
from lowbit.evals.process_cost import CommandFailed, ProcessCost
from lowbit.evals.recommend import Wanted, fits, recommend, recommendation
from lowbit.evals.report_blocks import Sentence, blocks
from lowbit.evals.results import read_results
from lowbit.evals.summary import grade, summarize
from lowbit.evals.windows import Windowing
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.compare import _candidates, compare
from lowbit.quantize.gguf.as_folder import contents
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.reader import GGUFFile
from lowbit.quantize.recipe import Recipe, WeightPass
from typer.testing import CliRunner

from .models import change_tensors, copied
from .results_sample import sample_report

SMALL = ["--samples", "4", "--seq-len", "32", "--ctx", "64", "--windows", "2"]


@pytest.fixture
def made(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was made: a checkpoint is the model, changed a little; a GGUF file is one."""
    names: list[str] = []

    def run(command: list[str], log: Path) -> ProcessCost:
        out = Path(command[command.index("-o") + 1])
        names.append(out.name)
        if "FP8" in out.name:
            raise CommandFailed("exit code 2: no room")
        if "export" in command:
            export_gguf(shallow, out, command[command.index("--type") + 1], progress=False)
            return ProcessCost(1.0, 1.0, 10**8)
        recipe = Recipe.from_yaml(Path(command[command.index("--recipe") + 1]))
        assert recipe.calibration.samples == 4
        shutil.rmtree(out, ignore_errors=True)
        copied(shallow, out)
        factor = 1.5 if "rtn" in out.name else 1.2
        change_tensors(out, lambda t: t["model.norm.weight"].mul_(factor))
        return ProcessCost(2.0, 3.0, 10**8)

    monkeypatch.setattr(matrix_study, "run_command", run)
    return names


def run(shallow: Path, story: Path, out: Path, *more: str, code: int = 0) -> Any:
    app = typer.Typer()
    app.command()(compare)
    texts = ["--calib", str(story), "--text", str(story), "--no-timing"]
    result = CliRunner().invoke(app, [str(shallow), "-o", str(out), *texts, *SMALL, *more])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_makes_measures_and_reports_once(
    shallow: Path, story: Path, made: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "c"
    asked = ["--schemes", "W4A16", "--methods", "rtn,gptq", "--gguf", "Q8_0", "--max-kld", "50"]
    shown = run(shallow, story, out, *asked)
    assert made == ["W4A16__rtn", "W4A16__gptq", "Q8_0__round.gguf"]
    results = read_results(out / "results.json")
    rows = {row["name"]: row for row in results["rows"]}
    assert list(rows) == ["base", "W4A16/rtn", "W4A16/gptq", "Q8_0/round"]
    klds = {name: row["divergence"]["kld_mean"] for name, row in rows.items() if name != "base"}
    assert 0 < klds["Q8_0/round"] < klds["W4A16/gptq"] < klds["W4A16/rtn"]
    assert rows["W4A16/rtn"]["made"]["method"] == "rtn"
    assert rows["W4A16/rtn"]["made"]["seconds"] == 2.0
    assert rows["Q8_0/round"]["path"] == str(out / "checkpoints" / "Q8_0__round.gguf")
    assert rows["Q8_0/round"]["size"]["file_bytes"] == Path(
        rows["Q8_0/round"]["path"]).stat().st_size  # fmt: skip
    assert results["noise_floor"]["kld_mean"] > 0
    assert results["recommendation"]["row"] == "Q8_0/round", "the smallest: the others are copies"
    words = grade(klds["Q8_0/round"], results["noise_floor"]["kld_mean"])
    recommended = f"Recommended within 50 nats: Q8_0/round, {words}."
    assert recommended in shown.stdout.replace("\\", "")
    assert "<svg" in (out / "report.html").read_text()

    made.clear()
    first = results["rows"]
    run(shallow, story, out, *asked)
    assert made == [] and read_results(out / "results.json")["rows"] == first
    (out / "W4A16__gptq.result.json").unlink()  # killed between measuring and the last word
    run(shallow, story, out, *asked)
    assert made == [], "its checkpoint is there"
    (out / "W4A16__gptq.result.json").unlink()
    (out / "W4A16__gptq.cost.json").unlink()  # killed while it was made
    run(shallow, story, out, *asked)
    assert made == ["W4A16__gptq"] and read_results(out / "results.json")["rows"] == first


def test_a_failure_leaves_the_others_and_is_told(
    shallow: Path, story: Path, made: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "c"
    shown = run(shallow, story, out, "--schemes", "FP8,W8A8", "--remove", code=2)
    assert "FP8/balanced failed: exit code 2: no room" in shown.stderr
    results = read_results(out / "results.json")
    assert [row["name"] for row in results["rows"]] == ["base", "W8A8/balanced"]
    assert results["errors"].keys() == {"FP8/balanced"}
    assert not list((out / "checkpoints").glob("*/config.json")), "removed once measured"


def test_another_protocol_needs_another_folder(
    shallow: Path, story: Path, made: list[str], tmp_path: Path
) -> None:
    run(shallow, story, tmp_path, "--schemes", "W4A16")
    with pytest.raises(UserError, match="holds results of windows = 2, now it is 1"):
        run(shallow, story, tmp_path, "--schemes", "W4A16", "--windows", "1")


def test_the_estimate_is_what_will_be_made(
    shallow: Path, story: Path, made: list[str], tmp_path: Path
) -> None:
    shown = run(shallow, story, tmp_path / "c", "--gguf", "Q4_K_M", "--estimate-only", "--json")
    assert made == []
    found = {c["key"]: c for c in json.loads(shown.stdout)["candidates"]}
    assert list(found) == ["W4A16/balanced", "W8A8/balanced", "Q4_K_M/round"]
    assert found["W4A16/balanced"]["tensor_bytes"] < found["W8A8/balanced"]["tensor_bytes"]
    file = tmp_path / "f.gguf"
    export_gguf(shallow, file, "Q4_K_M", progress=False)
    assert found["Q4_K_M/round"]["tensor_bytes"] == contents(GGUFFile(file)).tensor_bytes


def test_the_estimate_times_a_window_for_every_pass_and_the_start_of_every_process(
    shallow: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison_estimate, "start_seconds", lambda model: 2.0)
    recipe = Recipe((WeightPass(method="rtn"),))
    candidates = [Candidate("W4A16", f"m{i}", recipe=recipe) for i in range(3)]
    settings = settings_of({"calib": str(story), "text": str(story), "together": 2})
    windowing = Windowing(64, 64, windows=4)
    found = estimate(shallow, candidates, settings, windowing)
    assert found.windows == 4 and found.seconds_a_window is not None
    assert found.measuring == found.seconds_a_window * 4 * (3 + 2), "the base once for each two"
    assert found.starting == 2.0 * 3
    made = sum(c.seconds or 0.0 for c in found.candidates)
    assert found.seconds == pytest.approx(made + found.measuring + 6.0)
    timed = estimate(shallow, candidates, replace(settings, speed=True), windowing)
    assert timed.starting == 2.0 * (3 + 4), "each checkpoint and the original are timed apart"


def test_a_process_takes_time_to_start(shallow: Path) -> None:
    assert start_seconds(shallow) > 0.1


def test_what_the_model_cannot_have_is_left_out_and_named(
    shallow: Path, story: Path, made: list[str], tmp_path: Path
) -> None:
    asked = ["--methods", "rtn", "--group-size", "48", "--schemes", "W4A16"]
    shown = run(shallow, story, tmp_path, *asked, "--gguf", "Q8_0", code=2)
    said = "W4A16/rtn is left out: group size 48 does not divide the 64 input columns"
    assert said in " ".join(shown.stderr.split()) and made == ["Q8_0__round.gguf"]
    results = read_results(tmp_path / "results.json")
    assert [row["name"] for row in results["rows"]] == ["base", "Q8_0/round"]
    assert list(results["errors"]) == ["W4A16/rtn"]
    with pytest.raises(UserError, match="nothing that was named can be made, first W4A16/rtn: "):
        run(shallow, story, tmp_path / "other", *asked)


def test_a_group_size_is_that_of_the_schemes_with_groups() -> None:
    schemes = ["W4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4"]
    found = _candidates(",".join(schemes), "rtn", "", 64, {"source": "pydoc"})
    sizes = [c.recipe.passes[-1].group_size for c in found if c.recipe is not None]  # type: ignore[union-attr]
    assert sizes == [64, None, None, None, None]


def sample_rows() -> list[dict[str, Any]]:
    return json.loads(sample_report(models=3).to_json())["rows"]


def test_recommends_by_what_is_named() -> None:
    rows = sample_rows()  # each smaller, faster and worse than the one before
    names = [row["name"] for row in rows[1:]]
    sizes = [row["size"]["file_bytes"] for row in rows[1:]]
    klds = [row["divergence"]["kld_mean"] for row in rows[1:]]
    speeds = [row["speed"]["decode"] for row in rows[1:]]

    def chosen(**limits: Any) -> str | None:
        row = recommend(rows, Wanted(**limits))
        return None if row is None else row["name"]

    assert chosen(max_bytes=sizes[1]) == names[1], "the best that fits"
    assert chosen(max_kld=klds[1]) == names[1], "the smallest that is good enough"
    assert chosen(min_speed=speeds[1]) == names[1], "the best that is fast enough"
    assert chosen(max_bytes=sizes[1], min_speed=speeds[2]) == names[2]
    assert chosen(max_bytes=sizes[2] - 1) is None
    assert not fits({**rows[1], "speed": None}, Wanted(min_speed=1.0))
    assert all(row["name"] != "base" or row["divergence"] is None for row in rows)
    with pytest.raises(UserError, match="max_kld must be above 0"):
        Wanted(max_kld=-1.0)


def test_what_does_not_exist_is_said_with_the_nearest() -> None:
    results = json.loads(sample_report(models=3).to_json())
    found = recommendation(results["rows"], Wanted(max_bytes=10**6))
    assert found["row"] is None
    assert found["nearest"]["bytes"] == results["rows"][3]["size"]["file_bytes"]
    assert found["nearest"]["speed"] == results["rows"][3]["speed"]["decode"]
    results["recommendation"] = found
    said = next(b for b in blocks(summarize([("r.json", results)])) if isinstance(b, Sentence))
    text = "".join(piece.text for piece in said.pieces)
    assert text.startswith("None of at most 1.0 MB; the nearest: 33.6 MB, 0.0123 nats, 82.0 token")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schemes", "W9A9"], "W9A9"),
        (["--schemes", ""], "nothing to compare"),
        (["--gguf", "Q4_K_M+magic"], r"or one of \+imatrix, \+gptq"),
        (["--min-speed", "3"], "give --speed, too"),
        (["--max-size", "big"], "--max-size must be a size"),
        (["--protocol", "hf-2048", "--ctx", "64"], "give one of the two"),
        (["--together", "0"], "--together is 1 or more"),
    ],
)
def test_mistakes_are_named(
    shallow: Path, story: Path, made: list[str], tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(shallow, story, tmp_path / "c", *options)
    assert made == []


def test_gguf_methods_are_options_of_export() -> None:
    for method, options in GGUF_METHODS.items():
        name = "Q4_K_M" if method == "round" else f"Q4_K_M+{method}"
        found = gguf_candidate(name)
        assert (found.key, found.gguf, found.options) == (f"Q4_K_M/{method}", "Q4_K_M", options)


@pytest.mark.slow
def test_the_real_commands_make_what_is_compared(
    shallow: Path, story: Path, tmp_path: Path
) -> None:
    run(shallow, story, tmp_path, "--schemes", "W4A16,W8A16", "--methods", "rtn", "--gguf",
        "Q4_0+imatrix", "--speed")  # fmt: skip
    rows = {row["name"]: row for row in read_results(tmp_path / "results.json")["rows"]}
    klds = {name: row["divergence"]["kld_mean"] for name, row in rows.items() if name != "base"}
    assert 0 < klds["W8A16/rtn"] < klds["W4A16/rtn"]
    assert rows["W4A16/rtn"]["speed"]["decode"] > 0 and rows["Q4_0/imatrix"]["speed"] is None
    assert rows["W4A16/rtn"]["made"]["peak_memory"] > 1e7
    assert rows["W4A16/rtn"]["linears"] and rows["Q4_0/imatrix"]["linears"] is None
