"""`quantize report --history`: series of what was measured alike, regressions beyond the noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from lowbit.evals.history import Ranged, history, mark
from lowbit.evals.report_markdown import markdown
from lowbit.evals.report_plots import figure_svg
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.report import report
from typer.testing import CliRunner

from .results_sample import sample_bench, sample_report


def measured(day: int, kld: float = 0.0123, speed: float = 1.0, **protocol: Any) -> dict[str, Any]:
    """Results of a day: a base and one model, with a mean divergence and how fast it decodes."""
    found = json.loads(sample_report(models=1, **protocol).to_json())
    found["created"] = f"2026-03-{day:02d}T12:00:00+00:00"
    row = found["rows"][1]
    row["divergence"].update(kld_mean=kld, kld_mean_stderr=0.0005)
    for key in ("decode", "decode_min", "decode_max"):
        row["speed"][key] *= speed
    return found


def of(summary: dict[str, Any], metric: str) -> dict[str, list[dict[str, Any]]]:
    """The points of each series of a metric."""
    group = next(g for g in summary["groups"] if g["metric"] == metric)
    return {series["label"]: series["points"] for series in group["series"]}


def test_a_point_has_regressed_where_its_range_is_worse_than_the_bests() -> None:
    values = [Ranged(v, v - 1, v + 1) for v in (10.0, 11.9, 12.1, 8.0, 10.1, 9.9)]
    assert mark(values, lower=True) == [False, False, True, False, True, False]
    assert mark(values, lower=False) == [False, False, False, True, False, True]


def test_series_are_of_what_was_measured_alike() -> None:
    other = measured(4, text_sha256="cd" * 32)
    slow = measured(3, speed=0.5)
    slow["environment"]["threads"] = 9
    found = history([("c", slow), ("a", measured(1)), ("b", measured(2, 0.0129)), ("d", other)])
    points = of(found, "kld")["W7A16 gptq"]
    assert [p["file"] for p in points] == ["a", "b", "c"], "by time, without another text"
    assert points[1]["low"] == pytest.approx(0.0119) and not points[1]["regressed"]
    assert [p["file"] for p in of(found, "decode")["W7A16 gptq"]] == ["a", "b", "d"]
    assert set(of(found, "perplexity")) == {"tiny", "W7A16 gptq"}


def test_regressions_are_said_in_words_and_drawn() -> None:
    files = [("a.json", measured(1)), ("b.json", measured(2, 0.0163, speed=0.4))]
    found = history(files)
    text = markdown(found, "T")
    assert "**W7A16 gptq: mean KLD, nats is 0.0163 (0.0153 to 0.0173) in b.json" in text
    assert "it was 0.0123 (0.0113 to 0.0133) in a.json" in text
    assert of(found, "decode")["W7A16 gptq"][1]["regressed"]
    group = next(g for g in found["groups"] if g["metric"] == "kld")
    assert "2026-03-02" in figure_svg("history", group, "h")
    assert "None." in markdown(history([files[0], ("c", measured(3))]), "T")


def test_loads_of_a_bench_are_series_too() -> None:
    files = []
    for day, factor in ((1, 1.0), (2, 0.6)):
        row = {"name": "w4", "path": "/w4", "size": None, "bench": sample_bench(factor)}
        files.append((f"{day}", {**measured(day), "protocol": None, "rows": [row]}))
    found = history(files)
    points = of(found, "throughput")
    assert set(points) == {
        f"w4, {variant}, {n} clients, 16 of 100-200 to 32-32 tokens, seed 0"
        for variant, n in (("plain", 8), ("other", 8), ("plain", 2))
    }
    assert all(p[1]["regressed"] for p in points.values())
    assert all(p[1]["regressed"] for p in of(found, "ttft").values())


def test_the_command_writes_it_or_says_why_not(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report)

    def run(*arguments: object) -> None:
        outcome = CliRunner().invoke(app, [str(a) for a in arguments])
        if outcome.exception is not None:
            raise outcome.exception

    for name, results in (("a", measured(1)), ("b", measured(2))):
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    files = tmp_path / "a.json", tmp_path / "b.json"
    run(*files, "--history", "-o", tmp_path / "h.html")
    assert "<svg" in (tmp_path / "h.html").read_text()
    with pytest.raises(UserError, match="nothing in common that was measured twice alike"):
        run(files[0], "--history", "-o", tmp_path / "x.md")
