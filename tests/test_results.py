"""The results file: what is written fits the schema, and what does not is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from lowbit.evals import results_schema
from lowbit.evals.bench import schema as bench_schema
from lowbit.evals.bench.checks import Check
from lowbit.evals.bench.latency import SLO, Spread
from lowbit.evals.bench.memory import MemorySplit
from lowbit.evals.bench.roofline import Ceilings, Phase
from lowbit.evals.bench.served import Cell, QuantileSpreads, Ratio, Served
from lowbit.evals.bench.session import Bench, Roofline
from lowbit.evals.divergence import ConfidenceBucket, Divergence
from lowbit.evals.generation import Generation, Sample
from lowbit.evals.linears import LinearResult
from lowbit.evals.perplexity import Perplexity
from lowbit.evals.report import Environment, Protocol, Report, Row, plain
from lowbit.evals.results import check_results, read_results
from lowbit.evals.size import SizeReport
from lowbit.evals.speed import DecodeSpeed
from lowbit.evals.tasks import Paired, TaskResult
from lowbit.evals.windows import Windowing
from lowbit.kernels.errors import UserError

from .results_sample import sample_report

SCHEMA_FILE = Path(__file__).parents[1] / "docs" / "results.schema.json"


def test_the_published_schema_is_the_one_in_use() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == results_schema.text()
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(results_schema.SCHEMA)


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (Perplexity, results_schema.PERPLEXITY), (Divergence, results_schema.DIVERGENCE),
        (ConfidenceBucket, results_schema.BUCKET), (SizeReport, results_schema.SIZE),
        (DecodeSpeed, results_schema.SPEED), (LinearResult, results_schema.LINEAR),
        (TaskResult, results_schema.TASK), (Paired, results_schema.PAIRED),
        (Windowing, results_schema.WINDOWING), (Protocol, results_schema.PROTOCOL),
        (Environment, results_schema.ENVIRONMENT), (Served, bench_schema.SERVED),
        (QuantileSpreads, bench_schema.QUANTILES), (Spread, bench_schema.SPREAD),
        (Ratio, bench_schema.RATIO), (Cell, bench_schema.CELL), (Check, bench_schema.CHECK),
        (MemorySplit, bench_schema.MEMORY), (Ceilings, bench_schema.CEILINGS),
        (Phase, bench_schema.PHASE), (Roofline, bench_schema.ROOFLINE), (SLO, bench_schema.SLO),
        (Bench, bench_schema.BENCH), (Generation, results_schema.GENERATION),
        (Sample, results_schema.SAMPLE),
    ],
)  # fmt: skip
def test_the_schema_names_every_field(kind: Any, schema: dict[str, Any]) -> None:
    fields = getattr(kind, "_fields", None) or tuple(kind.__dataclass_fields__)
    assert set(schema["properties"]) == set(fields) >= set(schema["required"])


def test_a_row_of_the_schema_is_a_row() -> None:
    known = set(results_schema.ROW["properties"])
    assert set(Row._fields) <= known
    assert known - set(Row._fields) <= {"made", "bench"}, "what others than eval write"


def test_a_report_is_a_results_file_and_is_read_back(tmp_path: Path) -> None:
    report = sample_report()
    file = tmp_path / "r.json"
    file.write_text(report.to_json(), encoding="utf-8")
    read = read_results(file)
    assert read["rows"] == plain(report.rows)
    assert read["producer"]["command"] == "eval" and read["version"] == 1
    bare = Report(report.protocol, report.environment, report.rows[:1], 0.0)
    check_results(json.loads(bare.to_json()), "it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(format="other"), "is no results file: its 'format' is not"),
        (lambda r: r.update(version=2), "of version 2; this lowbit reads version 1"),
        (lambda r: r.pop("rows"), "at the whole: 'rows' is a required property"),
        (lambda r: r["rows"][1].pop("size"), "at rows/1: 'size' is a required property"),
        (lambda r: r["rows"][1]["size"].update(file_bytes=-1), "at rows/1/size/file_bytes: -1"),
        (lambda r: r["protocol"].update(windowing=None), "at protocol"),
        (lambda r: r["rows"][1]["divergence"].update(top1=97.0), "at rows/1/divergence"),
        (lambda r: r["rows"][1]["divergence"].update(kld_mean=float("nan")), "holds NaN"),
    ],
)
def test_what_is_no_results_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    value = json.loads(sample_report().to_json())
    change(value)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_results(file)


def test_files_that_are_missing_or_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such results file"):
        read_results(tmp_path / "absent.json")
    (tmp_path / "r.json").write_text("[1]")
    with pytest.raises(UserError, match="holds a list"):
        read_results(tmp_path / "r.json")
    with pytest.raises(UserError, match="is a folder, not a results file"):
        read_results(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "notes of a run"])
def test_what_is_no_json_was_never_downloaded(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.txt").write_text(content)
    with pytest.raises(UserError, match="no results file .* quantize eval --report") as refusal:
        read_results(tmp_path / "r.txt")
    assert "download" not in str(refusal.value)


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "jsonschema" else find(n, *a)
    )
    with pytest.raises(UserError, match=r"pip install 'lowbit\[evals\]'"):
        check_results({}, "it")
