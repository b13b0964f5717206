"""Fuzz lowbit's readers: damaged files of small checkpoints, until the time is up.

    python -m lowbit.evals.fuzz [--seconds 3600] [--seed 0] [--engine hypothesis atheris]
        [--targets NAME ...] [--keep FOLDER]

Every input is a damaged file of a whole checkpoint (fuzz_targets.py). A reader may read it, report
findings or raise UserError; anything else is a fault, and so is an input that takes too long or too
much memory (fuzzer.py). hypothesis draws the damage and shrinks what fails; atheris, where it is
installed (`pip install atheris`; it is not built for every Python), draws it from bytes that it
changes by the coverage of lowbit's code. The time is divided evenly among engines and targets.

Prints a report as JSON, and on the standard error a line for each target that is done; the exit
code is 1 where there is a fault. Ctrl-C ends it with a report of the targets that were done.
--keep: a folder for the inputs that fail.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .fuzz_targets import TARGETS, make_sources
from .fuzzer import Fuzzer, limit_memory, quiet

ENGINES = ("hypothesis", "atheris")
ROUND = 50  # inputs between two looks at the clock
GRACE = 1800  # seconds beyond its time, start included, after which atheris is ended


def fuzz_with_hypothesis(fuzzer: Fuzzer, seconds: float, seed: int, examples: int = ROUND) -> None:
    """Rounds of `examples` inputs, each with the next seed, until the time is up; at least one."""
    hypothesis: Any = importlib.import_module("hypothesis")
    strategies: Any = importlib.import_module("hypothesis.strategies")
    end = time.monotonic() + seconds
    while True:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=examples, deadline=None, database=None, print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
            verbosity=hypothesis.Verbosity.quiet,
        )  # fmt: skip
        @hypothesis.given(strategies.data())
        def one_round(drawn: Any) -> None:
            fuzzer.try_one(lambda n: drawn.draw(strategies.integers(0, n - 1)))

        before = fuzzer.faults.total()
        try:
            one_round()
        except KeyboardInterrupt:
            raise
        except BaseException:  # it has been noted, or it is hypothesis' own
            if fuzzer.faults.total() == before:
                raise
        seed += 1
        if time.monotonic() >= end:
            return


def fuzz_with_atheris(
    name: str, sources: Path, seconds: float, seed: int, keep: Path | None
) -> dict[str, Any]:
    """What atheris finds in the target `name`, in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            sys.executable, "-m", "lowbit.evals.fuzz_atheris", name, str(sources), str(report),
            str(seconds), str(seed), *([] if keep is None else [str(keep.absolute())]),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=scratch, timeout=seconds + GRACE
            )
        except subprocess.TimeoutExpired as e:
            return {"inputs": 0, "faults": [_fault(name, str(e), "no end")]}
        if not report.exists():
            raise RuntimeError(f"atheris ended with {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(report.read_text(encoding="utf-8"))
        if done.returncode != 0:  # libFuzzer's own verdict: a timeout, a crash
            found["faults"].append(_fault(name, done.stderr[-500:], "libFuzzer"))
        return found


def _fault(name: str, error: str, place: str) -> dict[str, Any]:
    return {"target": name, "error": error, "place": place, "inputs": 1}


def main() -> None:
    parser = argparse.ArgumentParser(prog="lowbit.evals.fuzz")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=None)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--keep", type=Path, default=None)
    args = parser.parse_args()
    engines = args.engine or [e for e in ENGINES if importlib.util.find_spec(e) is not None]
    quiet()
    results: dict[str, Any] = {}
    start = time.monotonic()
    try:
        _run(engines, args, results)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    report = {
        "seconds": round(time.monotonic() - start), "interrupted": interrupted, "seed": args.seed,
        "engines": engines,
        "inputs": sum(found["inputs"] for found in results.values()),
        "faults": sum(len(found["faults"]) for found in results.values()),
        "by_target": results,
    }  # fmt: skip
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.exit(1 if report["faults"] else 130 if interrupted else 0)


def _run(engines: list[str], args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Put what is found into `results`, by target and engine, as each is done."""
    share = args.seconds / (len(engines) * len(args.targets))
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(Path(folder))
        limit_memory()
        for name in args.targets:
            for engine in engines:
                key = f"{name}, {engine}"
                if engine == "atheris":
                    found = fuzz_with_atheris(name, sources, share, args.seed, args.keep)
                else:
                    scratch = Path(folder) / key
                    scratch.mkdir()
                    fuzzer = Fuzzer(name, sources, scratch, args.keep)
                    fuzz_with_hypothesis(fuzzer, share, args.seed)
                    found = fuzzer.facts()
                results[key] = found
                faults = len(found["faults"])
                sys.stderr.write(f"{key}: {found['inputs']} inputs, {faults} faults\n")


if __name__ == "__main__":
    main()
