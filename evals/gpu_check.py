"""`python -m lowbit.evals.gpu_check`: right, batch-invariant and fast on this machine's GPU?

Every case of kernels/cases in its real shape: against the float64 reference on fresh random
operands with outputs poisoned, rows alone against the batch; by several processes, since most of
the time goes to compilers. Then speeds, one at a time, each a module in `SPEEDS` with `names()`,
`warm(name)`, which compiles, and `speeds(name)`: of kernels, times from events around replayed
graphs, medians, beside the ceilings measured first; of decode steps, times of the wall, where they
give the same logits and tokens with graphs and without. One table, one JSON (--json), which is
complete as far as things went whenever the check is stopped. What crashes a process is a fault of
its row alone. Exit code 1 when something is wrong or misses its bar, 2 without a GPU. Takes up no
work after --minutes (8).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..kernels.cases import all_cases
from .gpu_speed import Ceilings, Speed
from .gpu_workers import Job, Row, Worker, do_all

SPEEDS = ("gpu_speed_linear", "gpu_speed_attention", "gpu_speed_decode")
"""Modules of this folder that measure, in the order of the table."""
CASES_SHARE = 0.5  # of the time, at most, for the cases and what speeds compile
JOB_SECONDS = 100.0  # for one of those, compilers included
MOST_WORKERS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowbit.evals.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--minutes", type=float, default=8.0, help="take up no work after these")
    parser.add_argument("--seed", type=int, default=0, help="of the operands")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write(
            "error: gpu_check needs a CUDA or ROCm GPU, and torch sees none here; "
            "`python -m lowbit.kernels.audit` checks the same kernels without one\n"
        )
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of the workers, as this is:
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # what is not deterministic says so
    report = Report(_facts(options.seed), options.json)
    count = max(1, min(MOST_WORKERS, (os.cpu_count() or 2) - 2))
    run(report, [Worker() for _ in range(count)], 60 * options.minutes, _target())
    sys.stdout.write(table(report.data))
    return 1 if report.is_wrong() else 0


class Report:
    """What was found so far, in the file at `path` after every job."""

    def __init__(self, facts: dict[str, Any], path: Path | None) -> None:
        self.data: dict[str, Any] = {
            **facts, "seconds": 0.0, "ceilings": None, "cases": [], "speeds": [], "faults": [],
        }  # fmt: skip
        self._path, self._start = path, time.monotonic()

    def add_row(self, job: Job, row: Row) -> None:
        if job["kind"] == "ceilings":
            self.data["ceilings"] = row
        elif job["kind"] == "case":
            self.data["cases"].append(row)
            _tell(f"{row['case']}: {'; '.join(row['faults']) or 'right'}")
        elif job["kind"] == "speed":
            speed = Speed(**row)
            self.data["speeds"].append(_speed_row(speed, self._ceilings()))
            _tell(f"{speed.what} {speed.size}: {1e6 * speed.ours:.1f} us, {speed.ratio:.2f}x")

    def end_job(self, job: Job, fault: str | None) -> None:
        name = job.get("name", "")
        if fault is not None and job["kind"] == "case":
            self.add_row(job, {"case": name, "faults": [fault]})
        elif fault is not None:
            said = f"{job['kind']} {name}: {fault}"
            _tell(said)
            if job["kind"] != "warm":  # else the speed meets it, too
                self.data["faults"].append(said)
        self.save()

    def save(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self._start, 1)
        if self._path is not None:
            new = self._path.with_name(self._path.name + ".new")
            new.write_text(json.dumps(self.data, indent=2) + "\n", encoding="utf-8")
            new.replace(self._path)

    def is_wrong(self) -> bool:
        rows = (*self.data["cases"], *self.data["speeds"])
        return bool(self.data["faults"]) or any(row["faults"] for row in rows)

    def _ceilings(self) -> Ceilings | None:
        return None if self.data["ceilings"] is None else Ceilings(**self.data["ceilings"])


def run(report: Report, workers: Sequence[Worker], seconds: float, target: str) -> None:
    """All jobs within `seconds`: the ceilings, the cases and what speeds will compile by all
    `workers`, the speeds by one of them, each module for its even share of what is left."""
    start = time.monotonic()
    modules = {name: importlib.import_module(f".{name}", __package__) for name in SPEEDS}
    plain = {"kind": "case", "size": "real", "device": "cuda", "seed": report.data["seed"]}
    cases = [
        {**plain, "name": case.name}
        for case in all_cases("real")
        if not case.targets or target in case.targets
    ]
    warm = [
        {"kind": "warm", "module": module, "name": name}
        for module, of in modules.items()
        for name in of.names()
    ]
    ends = report.add_row, report.end_job
    try:
        do_all([{"kind": "ceilings"}], workers[:1], start + seconds, JOB_SECONDS, *ends)
        do_all([*cases, *warm], workers, start + CASES_SHARE * seconds, JOB_SECONDS, *ends)
        for worker in workers[1:]:
            worker.close()
        for left, (module, of) in zip(range(len(modules), 0, -1), modules.items(), strict=True):
            now = time.monotonic()
            end = now + (start + seconds - now) / left
            jobs = [{"kind": "speed", "module": module, "name": name} for name in of.names()]
            do_all(jobs, workers[:1], end, JOB_SECONDS, *ends)
    finally:
        for worker in workers:
            worker.close()


def _facts(seed: int) -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton,
        "seed": seed,
    }  # fmt: skip


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


def _target() -> str:
    """This device's name among the audit's targets, or "" where it is none of them."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    return f"sm_{torch.cuda.get_device_capability()[0]}0"


def _speed_row(speed: Speed, ceilings: Ceilings | None) -> Row:
    share = None if ceilings is None else speed.bandwidth_share(ceilings)
    return {
        **speed._asdict(), "ratio": speed.ratio, "faults": speed.faults(ceilings),
        "bandwidth_share": share, "operations_a_second": speed.operations / speed.ours,
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{report['device']}, torch {report['torch']}, triton {report['triton']}, seed "
        f"{report['seed']}, {report['seconds']} s"
    ]
    if report["ceilings"] is not None:
        lines.append(
            f"copy {report['ceilings']['bandwidth'] / 1e12:.2f} TB/s, "
            f"bfloat16 {report['ceilings']['matmul'] / 1e12:.0f} TFLOP/s"
        )
    lines.append("")
    for row in report["cases"]:
        lines.append(f"{row['case']:<52} {'; '.join(row['faults']) or 'right'}")
    header = f"{'speed':<28} {'size':>6} {'kernel':<16} {'us':>9} {'torch us':>9} {'ratio':>6}"
    lines += ["", f"{header} {'of copy':>7} {'TFLOP/s':>8}  bars"]
    for row in report["speeds"]:
        share = row["bandwidth_share"]
        lines.append(
            f"{row['what']:<28} {row['size']:>6} {row['kernel']:<16} {1e6 * row['ours']:>9.1f} "
            f"{1e6 * row['theirs']:>9.1f} {row['ratio']:>5.2f}x "
            f"{'-' if share is None else f'{share:.0%}':>7} "
            f"{row['operations_a_second'] / 1e12:>8.0f}  {'; '.join(row['faults']) or 'met'}"
        )
    lines += ["", *report["faults"]] if report["faults"] else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
