"""Kill commands that write files, at random operations, and look at what is left.

    python -m lowbit.evals.kill_bench [--points 200] [--seed 0] [--scenarios NAME ...]

Each scenario is a command on a tiny random Llama. One unbroken run counts its operations on files
(kill_points.py) and gives the bytes that are expected. Then the same command is killed at randomly
drawn operations, and must leave no output, the older output that it was to replace, or the whole
one; nothing anywhere that `quantize verify` calls whole and is not; and work from which the same
command ends in the expected bytes and leaves nothing beside them. Every rename is checked for bytes
that had not been fsynced.

Prints a report as JSON, with the faults that were found; the exit code is 1 where there is one.
Commands run in processes forked from this one, which has torch loaded and one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .kill_trials import KillTrials, Point, Scenario, Unbroken

RUN = ["run", "{model}", "--group-size", "32", "--max-shard-size", "20KB"]
RTN = [*RUN, "--method", "rtn"]
GPTQ = [
    *RUN, "--method", "gptq", "--calib", "{text}", "--samples", "4", "--seq-len", "32",
    "--dtype", "float32",
]  # fmt: skip
EXPORT = ["export", "{packed}", "--pre", "gpt-2"]
CONVERT = ["convert", "{packed}", "--max-shard-size", "20KB"]
SCENARIOS = {
    "run, streamed": Scenario("out", RTN),
    "run, calibrated": Scenario("out", GPTQ),
    "run, streamed, over an older one": Scenario(
        "out", [*RTN, "--overwrite"], [*RTN, "--scheme", "W3A16"]
    ),
    "run, calibrated, over an older one": Scenario("out", [*GPTQ, "--overwrite"], RTN),
    "convert": Scenario("out", [*CONVERT, "--to", "gptq"]),
    "convert over an older one": Scenario(
        "out", [*CONVERT, "--to", "gptq", "--overwrite"], [*CONVERT, "--to", "gptq_v2"]
    ),
    "export": Scenario("out.gguf", [*EXPORT, "--type", "Q4_0"]),
    "export over an older one": Scenario(
        "out.gguf", [*EXPORT, "--type", "Q4_0", "--overwrite"], [*EXPORT, "--type", "Q8_0"]
    ),
}


def draw(operations: dict[str, int], points: int, seed: int) -> list[tuple[str, int, float]]:
    """Scenario, operation and torn share of each kill: the scenarios by turns, operations without
    repetition while there are any left."""
    chance = random.Random(seed)
    left: dict[str, list[int]] = {}
    drawn = []
    for index in range(points):
        name = list(operations)[index % len(operations)]
        if not left.get(name):
            left[name] = chance.sample(range(1, operations[name] + 1), operations[name])
        drawn.append((name, left[name].pop(), round(chance.random(), 3)))
    return drawn


def run_bench(scratch: Path, points: int, seed: int, names: list[str]) -> dict[str, Any]:
    """The report: per scenario its operations, points, what was left, and the faults."""
    start = time.perf_counter()
    trials = KillTrials(scratch, RTN)
    unbroken = {name: trials.unbroken(SCENARIOS[name]) for name in names}
    results: dict[str, list[Point]] = {name: [] for name in names}
    drawn = draw({name: u.operations for name, u in unbroken.items()}, points, seed)
    for name, kill_at, torn in drawn:
        results[name].append(trials.killed(SCENARIOS[name], unbroken[name], kill_at, torn))
    scenarios = {name: _summary(unbroken[name], results[name]) for name in names}
    return {
        "points": points,
        "seed": seed,
        "faults": sum(len(s["faults"]) + len(s["unsynced"]) for s in scenarios.values()),
        "scenarios": scenarios,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _summary(unbroken: Unbroken, points: list[Point]) -> dict[str, Any]:
    return {
        "operations": unbroken.operations,
        "points": len(points),
        "left": dict(sorted(Counter(p.left for p in points).items())),
        "resumed": sum(p.resumed for p in points),
        "unsynced": unbroken.unsynced,
        "faults": [p._asdict() for p in points if p.faults],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--scratch", type=Path, help="Where to work (in a folder of its own).")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    import torch

    from ..quantize import conversion, runner, verification  # noqa: F401 (loaded before the forks)
    from ..quantize.gguf import export  # noqa: F401
    from .report import environment

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        report = run_bench(Path(scratch), args.points, args.seed, args.scenarios)
    report["environment"] = vars(environment(torch.device("cpu")))
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    sys.exit(int(report["faults"] > 0))


if __name__ == "__main__":
    main()
