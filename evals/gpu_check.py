"""`python -m lowbit.evals.gpu_check`: right, batch-invariant and fast on this machine's GPU?

Every case of kernels/cases in its real shape: against the float64 reference on fresh random
operands with outputs poisoned, rows alone against the batch. Then speeds, each a module in `SPEEDS`
with `speeds(ceilings)`: times from events around replayed graphs, medians, beside the ceilings
measured first. One table, one JSON (--json); exit code 1 when something is wrong or misses its bar,
2 without a GPU. Stops taking up work after --minutes (8), and says what was left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..kernels.cases import all_cases
from ..kernels.cases.case import Case
from ..kernels.cases.check import check_case
from .gpu_speed import Ceilings, Speed

SPEEDS = ("gpu_speed_linear", "gpu_speed_attention")
"""Modules of this folder that measure, in the order of the table."""
CASES_SHARE = 0.5  # of the time, at most, for the cases


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
    start, limit = time.monotonic(), 60 * options.minutes
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    checked = list(_checks(all_cases("real"), options.seed, start + CASES_SHARE * limit))
    from .gpu_timer import copy_bandwidth, matmul_rate

    ceilings = Ceilings(copy_bandwidth(), matmul_rate())
    measured = list(_measure(ceilings, start + limit))
    report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": options.seed,
        "seconds": round(time.monotonic() - start, 1), "ceilings": ceilings._asdict(),
        "cases": checked, "speeds": [_speed_row(s, ceilings) for s in measured],
    }  # fmt: skip
    sys.stdout.write(table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    wrong = any(row["faults"] for row in (*report["cases"], *report["speeds"]))
    return 1 if wrong else 0


def _checks(cases: Iterable[Case], seed: int, deadline: float) -> Iterator[dict[str, Any]]:
    """A row for each case; outputs are filled with NaN before a kernel gets them."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what is allocated, too
    try:
        for case in cases:
            if case.targets and _target() not in case.targets:
                continue
            late = time.monotonic() > deadline
            faults = ["left out: no time"] if late else checked_faults(case, "cuda", seed)
            yield {"case": case.name, "faults": faults}
            torch.cuda.empty_cache()
    finally:
        torch.use_deterministic_algorithms(False)


def checked_faults(case: Case, device: str, seed: int) -> list[str]:
    """`check_case`, with what it raises as a fault: one broken kernel must not hide the others."""
    try:
        return check_case(case, device, seed)
    except Exception as e:  # a compiler's or a driver's; all are findings here
        return [f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"]


def _target() -> str:
    """This device's name among the audit's targets, or "" where it is none of them."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    return f"sm_{torch.cuda.get_device_capability()[0]}0"


def _measure(ceilings: Ceilings, deadline: float) -> Iterator[Speed]:
    """Each module's speeds, for its even share of the time that is left when it begins."""
    for left, name in zip(range(len(SPEEDS), 0, -1), SPEEDS, strict=True):
        end = time.monotonic() + (deadline - time.monotonic()) / left
        module = importlib.import_module(f".{name}", __package__)
        for speed in module.speeds(ceilings):
            yield speed
            if time.monotonic() > end:
                sys.stderr.write(f"out of time after {speed.what} at {speed.size}\n")
                break


def _speed_row(speed: Speed, ceilings: Ceilings) -> dict[str, Any]:
    return {
        **speed._asdict(), "ratio": speed.ratio, "faults": speed.faults(ceilings),
        "bandwidth_share": speed.bandwidth_share(ceilings),
        "operations_a_second": speed.operations / speed.ours,
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    ceilings = report["ceilings"]
    lines = [
        f"{report['device']}, torch {report['torch']}, seed {report['seed']}: "
        f"copy {ceilings['bandwidth'] / 1e12:.2f} TB/s, "
        f"bfloat16 {ceilings['matmul'] / 1e12:.0f} TFLOP/s, {report['seconds']} s",
        "",
    ]
    for row in report["cases"]:
        lines.append(f"{row['case']:<52} {'; '.join(row['faults']) or 'right'}")
    header = f"{'speed':<26} {'size':>6} {'kernel':<8} {'us':>9} {'torch us':>9} {'ratio':>6}"
    lines += ["", f"{header} {'of copy':>7} {'TFLOP/s':>8}  bars"]
    for row in report["speeds"]:
        lines.append(
            f"{row['what']:<26} {row['size']:>6} {row['kernel']:<8} {1e6 * row['ours']:>9.1f} "
            f"{1e6 * row['theirs']:>9.1f} {row['ratio']:>5.2f}x {row['bandwidth_share']:>7.0%} "
            f"{row['operations_a_second'] / 1e12:>8.0f}  {'; '.join(row['faults']) or 'met'}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
