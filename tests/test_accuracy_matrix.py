"""The accuracy matrix: what is done is not done again, and the table says who passed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from lowbit.evals import accuracy_matrix, matrix_study, peers
from lowbit.evals.matrix_rows import PEER_ROWS, ROWS, Bar, MatrixRow, chosen_rows
from lowbit.evals.matrix_table import Result, best_peer, markdown_table, table, verdict
from lowbit.evals.process_cost import CommandFailed, ProcessCost, run_command
from lowbit.kernels.errors import UserError

from .models import change_tensors, copied

RUN = ["--rows", "W4A16-g64/rtn,W4A16-g64/gptq,W8A8/rtn", "--fast", "--together", "2"]


@pytest.fixture
def runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that were run, by the folder that they made: a model that differs a little."""
    made: list[str] = []

    def run(command: list[str], log: Path) -> ProcessCost:
        out = Path(command[-1] if "-o" not in command else command[command.index("-o") + 1])
        made.append(out.name)
        if out.name.startswith("W8A8"):
            raise CommandFailed("exit code 2: error: no room")
        copied(tiny, out)
        change_tensors(
            out, lambda t: t["model.norm.weight"].mul_(1.5 if "rtn" in out.name else 1.25)
        )
        return ProcessCost(2.0, 3.0, 10**8)

    monkeypatch.setattr(matrix_study, "run_command", run)
    return made


def matrix(monkeypatch, tiny: Path, story: Path, out: Path, *more: str) -> int:
    arguments = ["--models", str(tiny), "--calib", str(story), "--text", str(story)]
    monkeypatch.setattr(sys, "argv", ["matrix", *arguments, "--out", str(out), *RUN, *more])
    try:
        accuracy_matrix.main()
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_goes_on_where_it_was_killed(tiny, story, runs, tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "matrix"
    assert matrix(monkeypatch, tiny, story, out) == 1, "a failed row is told by the exit code"
    assert runs == ["W4A16-g64__rtn", "W4A16-g64__gptq", "W8A8__rtn"]
    assert "W8A8/rtn: exit code 2: error: no room" in capsys.readouterr().err
    results = json.loads((out / "matrix.json").read_text())["tiny"]["results"]
    klds = {key: r["kld"] for key, r in results.items()}
    assert 0 < klds["W4A16-g64/gptq"] < klds["W4A16-g64/rtn"]
    assert results["W8A8/rtn"]["error"].endswith("no room")
    assert not any((out / "tiny" / "checkpoints").glob("*/config.json")), "checkpoints are removed"

    runs.clear()
    assert matrix(monkeypatch, tiny, story, out) == 1
    assert runs == []
    (out / "tiny" / "W4A16-g64__gptq.result.json").unlink()  # killed before it was measured
    shutil.copytree(tiny, out / "tiny" / "checkpoints" / "W4A16-g64__gptq")
    matrix(monkeypatch, tiny, story, out, "--redo", "W8A8/rtn")
    assert runs == ["W8A8__rtn"]
    results = json.loads((out / "matrix.json").read_text())["tiny"]["results"]
    assert results["W4A16-g64/gptq"]["kld"] == pytest.approx(0, abs=1e-6)


def test_refuses_to_mix_protocols(tiny, story, runs, tmp_path, monkeypatch, capsys) -> None:
    assert matrix(monkeypatch, tiny, story, tmp_path / "m") == 1
    text = tmp_path / "other.txt"
    text.write_text(story.read_text() + "One more sentence. ")
    monkeypatch.setattr(sys, "argv", [
        "matrix", "--models", str(tiny), "--calib", str(story), "--text", str(text),
        "--out", str(tmp_path / "m"), *RUN,
    ])  # fmt: skip
    with pytest.raises(SystemExit) as e:
        accuracy_matrix.main()
    assert e.value.code == 2 and "give another --out" in capsys.readouterr().err


def test_the_page_gets_the_table_and_keeps_its_text(
    tiny, story, runs, tmp_path, monkeypatch
) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n")
    for _ in range(2):
        matrix(monkeypatch, tiny, story, tmp_path / "m", "--markdown", str(page))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("| W4A16-g64 | rtn |") == 1 and "sha256" in text


def test_peers_run_on_the_same_rows(tiny, story, runs, tmp_path, monkeypatch) -> None:
    out = tmp_path / "m"
    peer = f"llm-compressor={sys.executable}"
    matrix(monkeypatch, tiny, story, out, "--peer", peer)
    assert runs[3:] == ["llm-compressor__W4A16-g64__gptq", "llm-compressor__W8A8__smoothquant+gptq"]
    rows = json.loads((out / "tiny" / "rows.json").read_text())
    assert len(rows) == 4 and {len(row) for row in rows} == {128}
    assert "(llm-compressor)" in (out / "matrix.md").read_text()


def result(key: str, kld: float, tool: str | None = None, perplexity: float = 20.0) -> Result:
    family, method = key.split("/")
    whole = key if tool is None else f"{tool}/{key}"
    return Result(whole, family, method, tool, perplexity, 10.0, kld)


def test_bars_take_the_best_peer_and_measured_before_recorded() -> None:
    ours, other = result("W4A16-g64/gptq", 0.09), result("W4A16-g64/rtn", 0.30)
    results = {r.key: r for r in (ours, other)}
    recorded = best_peer("W4A16-g64", "smollm2", results)
    assert recorded is not None and recorded == ("gptqmodel", 0.1648, True)
    assert best_peer("W4A16-g64", "another", results) is None
    measured = result("W4A16-g64/gptq", 0.2, tool="llm-compressor")
    results |= {measured.key: measured}
    found = verdict(Bar(0.6), ours, "smollm2", results)
    assert found is not None and found.ratio == pytest.approx(0.45) and found.passed
    assert verdict(Bar(2, "original perplexity"), ours, "smollm2", results) == (
        2.0,
        2,
        "original perplexity",
    )
    missed = verdict(Bar(0.2, "W4A16-g64/rtn"), ours, "smollm2", results)
    assert missed is not None and not missed.passed
    row = MatrixRow("W4A16-g64", "gptq", bar=Bar(0.6))
    shown = markdown_table(table([row], "smollm2", results))
    assert "0.45 <= 0.6 of peers: passed" in shown and "gptq (llm-compressor)" in shown


def test_every_peer_row_can_be_run_and_no_key_is_twice() -> None:
    assert {row.key for row in PEER_ROWS} == peers.PEERS.keys()
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.family for row in PEER_ROWS} <= {row.family for row in ROWS}
    with pytest.raises(UserError, match="did you mean 'W4A16-g64"):
        chosen_rows(["W4A16-g46"])


def test_a_command_s_own_peak_is_counted_and_its_failure_shown(tmp_path: Path) -> None:
    ballast = bytearray(200_000_000)  # the parent's, which must not count
    cost = run_command([sys.executable, "-c", "x = bytearray(5 * 10**7)"], tmp_path / "log")
    assert 50e6 < cost.peak_memory < 150e6 and cost.seconds > 0
    del ballast
    with pytest.raises(CommandFailed, match="exit code 3: boom"):
        run_command([sys.executable, "-c", "print('boom'); raise SystemExit(3)"], tmp_path / "log")


def test_a_row_of_the_cache_alone_measures_the_model_itself(
    tiny, story, runs, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "m"
    arguments = ["--models", str(tiny), "--calib", str(story), "--text", str(story), "--fast"]
    monkeypatch.setattr(
        sys, "argv", ["matrix", *arguments, "--out", str(out), "--rows", "KV/int8,KV/int4_token"]
    )
    accuracy_matrix.main()
    results = json.loads((out / "matrix.json").read_text())["tiny"]["results"]
    assert runs == [] and (tiny / "config.json").exists()
    assert 0 < results["KV/int8"]["kld"] < results["KV/int4_token"]["kld"]


def test_one_that_cannot_be_measured_leaves_the_others(
    tiny, story, runs, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "m"
    broken = out / "tiny" / "checkpoints" / "W4A16-g64__rtn"
    copied(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"not a shard")
    (out / "tiny" / "W4A16-g64__rtn.cost.json").write_text("{}")
    assert matrix(monkeypatch, tiny, story, out) == 1
    results = json.loads((out / "matrix.json").read_text())["tiny"]["results"]
    assert "damaged" in results["W4A16-g64/rtn"]["error"]
    assert results["W4A16-g64/gptq"]["kld"] > 0
