"""Kills at random operations on files; and that the bench which does it would find a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lowbit.evals.kill_bench import SCENARIOS, draw

from .command import ENVIRONMENT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

# run with the operations that are counted in place; argv: kill_at, torn, folder
WRITES = """
import os, sys
from pathlib import Path
from lowbit.evals.kill_points import FileOperations
folder = Path(sys.argv[3])
operations = FileOperations(int(sys.argv[1]), float(sys.argv[2]))
operations.install()
with (folder / "a").open("wb") as f:  # 1: there is a file
    f.write(b"x" * 100)
    f.flush()  # 2
    os.fsync(f.fileno())  # 3
os.replace(folder / "a", folder / "b")  # 4
with open(folder / "c", "w", encoding="utf-8") as f:  # 5
    f.write("text")  # 6, on closing
(folder / "d").mkdir()  # 7
(folder / "c").rename(folder / "d" / "c")  # 8
(folder / "d").rename(folder / "e")  # 9
with (folder / "b").open("r+b") as f:
    f.write(b"y")  # 10, on closing
(folder / "b").unlink()  # 11
print(operations.count, operations.unsynced)
"""


def run_bench(*options: str, before: str = "") -> dict[str, object]:
    code = f"{before}\nfrom lowbit.evals.kill_bench import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, *options],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_kill_leaves_nothing_or_all_or_what_can_go_on() -> None:
    report = run_bench("--points", "8", "--seed", "1")
    assert report["faults"] == 0, json.dumps(report, indent=2)
    scenarios = report["scenarios"]
    assert isinstance(scenarios, dict) and list(scenarios) == list(SCENARIOS)
    assert all(s["points"] == 1 and s["operations"] > 20 for s in scenarios.values())


IN_ITS_PLACE = """
import contextlib, lowbit.quantize.gguf.writer as w
assert w.replacing
w.replacing = lambda out, names, overwrite: contextlib.nullcontext(out.parent)
"""


def test_the_bench_finds_an_output_that_is_made_in_its_place() -> None:
    report = run_bench("--points", "2", "--scenarios", "export", before=IN_ITS_PLACE)
    assert report["faults"]
    assert "neither none, nor the older, nor whole" in json.dumps(report)


@pytest.mark.parametrize(
    ("kill_at", "torn", "left"),
    [
        (1, 0, {}),
        (2, 0, {"a": 0}),
        (2, 0.25, {"a": 25}),
        (4, 0, {"a": 100}),
        (5, 0, {"b": 100}),
        (6, 0.5, {"b": 100, "c": 2}),
        (9, 0, {"b": 100, "d/c": 4}),
        (11, 0, {"b": 100, "e/c": 4}),
    ],
)
def test_dies_at_the_operation_asked_for(
    kill_at: int, torn: float, left: dict[str, int], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WRITES, str(kill_at), str(torn), str(tmp_path)]
    assert subprocess.run(command).returncode == -9
    files = {str(p.relative_to(tmp_path)): p for p in tmp_path.rglob("*") if p.is_file()}
    assert {name: p.stat().st_size for name, p in files.items()} == left


def test_tells_what_was_renamed_before_it_was_synced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, "0", "0", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    c, e = tmp_path / "c", tmp_path / "d" / "c"
    assert done.stdout == f"11 {[str(c), str(e)]}\n"


def test_draws_every_operation_once_before_any_twice() -> None:
    drawn = draw({"a": 3, "b": 10}, 12, seed=5)
    assert [d[0] for d in drawn] == ["a", "b"] * 6
    assert sorted(d[1] for d in drawn if d[0] == "a") == [1, 1, 2, 2, 3, 3]
    assert len({d[1] for d in drawn if d[0] == "b"}) == 6
    assert drawn == draw({"a": 3, "b": 10}, 12, seed=5) != draw({"a": 3, "b": 10}, 12, seed=6)
