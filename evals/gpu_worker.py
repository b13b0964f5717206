"""`python -m lowbit.evals.gpu_worker`: does jobs on a GPU for `gpu_check`, one process of several.

Jobs come as lines of JSON on standard input; for each, rows of results go out as lines as they are
found, then a line that says that the job is done. What an invalid access leaves behind is a process
whose every later call fails: it says so and ends, and gpu_check starts another.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.cases import all_cases
from ..kernels.cases.case import Case
from ..kernels.cases.check import check_case
from .gpu_speed import Ceilings, first_line


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        job = json.loads(line)
        try:
            for row in rows(job):
                _say(out, {"row": row})
            fault = None
        except Exception as e:  # a compiler's or a driver's; all are findings here
            fault = first_line(e)
        usable = _device_answers()
        _say(out, {"done": True, "fault": fault, "usable": usable})
        if not usable:
            sys.exit(3)


def _say(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _device_answers() -> bool:
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:  # whatever it is, the next job would meet it, too
        return False
    return True


def rows(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Results of a job by its kind: "ceilings"; "case", of a size, name, device and seed; "warm" or
    "speed", of a module and a name."""
    match job["kind"]:
        case "ceilings":
            from .gpu_timer import copy_bandwidth, matmul_rate

            yield Ceilings(copy_bandwidth(), matmul_rate())._asdict()
        case "case":
            found = {c.name: c for c in all_cases(job["size"])}[job["name"]]
            yield {"case": found.name, "faults": checked_faults(found, job["device"], job["seed"])}
        case "warm":
            importlib.import_module(f".{job['module']}", __package__).warm(job["name"])
        case "speed":
            module = importlib.import_module(f".{job['module']}", __package__)
            yield from (speed._asdict() for speed in module.speeds(job["name"]))


def checked_faults(case: Case, device: str, seed: int) -> list[str]:
    """`check_case` with outputs full of NaN, and with what it raises as a fault."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what is allocated, too
    try:
        return check_case(case, device, seed)
    except Exception as e:  # a compiler's or a driver's; all are findings here
        return [first_line(e)]
    finally:
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    main()
