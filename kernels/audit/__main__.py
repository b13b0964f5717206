"""`python -m lowbit.kernels.audit`: every shipped kernel for every target, held to its bars.

Compiles each case for each target on all cores, counts bytes in the interpreter, prints what falls
short and exits with 1 if anything does. --write puts the tables into docs/kernels.md, a family's
when it is done. --ci compiles the cases marked for it alone. Needs Triton, no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

from ..cases import FAMILIES, all_cases
from ..cases.case import Case
from .report import write_tables
from .targets import TARGETS
from .traffic import Moved
from .verdict import Verdict, audit_case, moved_faults

DOCUMENT = Path("docs/kernels.md")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowbit.kernels.audit", description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this one")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one")
    parser.add_argument(
        "--ci", action="store_true", help="only the cases that CI compiles and counts"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--write", action="store_true", help=f"rewrite the tables in {DOCUMENT}")
    options = parser.parse_args(arguments)
    if options.write and (options.target or options.ci):
        parser.error("--write takes all targets and cases")
    os.environ.pop("TRITON_INTERPRET", None)
    compiled, counted, faults = 0, 0, list[str]()
    with ProcessPoolExecutor(options.jobs) as pool:
        for family in options.family or FAMILIES:
            cases = [c for c in all_cases("real", family) if c.ci or not options.ci]
            verdicts, moved = audit_family(
                pool, family, cases, options.target or TARGETS, options.ci
            )
            faults += _faults(family, verdicts, moved)
            compiled, counted = compiled + len(verdicts), counted + len(moved)
            if options.write:
                write_tables(DOCUMENT, family, cases, verdicts, moved)
    sys.stdout.write(f"{compiled} compiled, {counted} counted, {len(faults)} faults\n")
    sys.stdout.writelines(f"  {fault}\n" for fault in faults)
    return 1 if faults else 0


def audit_family(
    pool: Executor, family: str, cases: Sequence[Case], targets: Iterable[str], only_ci: bool
) -> tuple[list[Verdict], dict[str, dict[str, Moved]]]:
    """What each of `cases` compiles to on each target, and the bytes that small ones move."""
    jobs = [
        pool.submit(_audit, case.name, target)
        for case in cases
        for target in targets
        if target in (case.targets or TARGETS)
    ]
    counting = pool.submit(_traffic, family, only_ci)
    return [_said(job.result()) for job in jobs], counting.result()


def _faults(
    family: str, verdicts: Sequence[Verdict], moved: dict[str, dict[str, Moved]]
) -> list[str]:
    faults = [f"{v.case} on {v.target}: {fault}" for v in verdicts for fault in v.faults]
    small = {c.name: c for c in all_cases("small", family) if c.name in moved}
    return faults + [
        f"{name}: {x}" for name, case in small.items() for x in moved_faults(case, moved[name])
    ]


def _said(verdict: Verdict) -> Verdict:
    state = "; ".join(verdict.faults) or "ok"
    line = f"{verdict.case:<44} {verdict.target:<7} {verdict.seconds:5.1f} s  {state}\n"
    sys.stderr.write(line)
    return verdict


def _case(name: str) -> Case:
    return next(c for c in all_cases("real") if c.name == name)


def _audit(name: str, target: str) -> Verdict:
    return audit_case(_case(name), target)


def _traffic(family: str, only_ci: bool) -> dict[str, dict[str, Moved]]:
    """Bytes moved by each small case, from a process with the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.traffic", family, *(["--ci"] if only_ci else [])],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"counting bytes of {family} failed:\n{done.stderr}")
    counted = json.loads(done.stdout)
    return {n: {k: Moved(*m) for k, m in of.items()} for n, of in counted.items()}


if __name__ == "__main__":
    sys.exit(main())
