"""What is left of a run that goes on, by what it has finished: layers, or streamed tensors.

Finished layers are read again and the calibration rows go through them once; that is all. What is
streamed is left aside where it is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib.shards import TensorInfo
from ..checkpoint.journal import unfinished_layers
from ..checkpoint.stream_output import unfinished_tensors
from ..linear_plan import Plan
from .work import Work, problems_of


def finished_before(out: Path, streamed: bool) -> frozenset[str]:
    """The layers, or the source's tensors, that an unfinished run of `out` has finished."""
    return frozenset(unfinished_tensors(out) if streamed else unfinished_layers(out))


def plan_of_rest(plan: Plan, finished: Collection[str], streamed: bool) -> Plan:
    """The plan without the linears that are finished."""
    if streamed:
        done = {n for n in plan.linears if f"{n}.weight" in finished}
    else:
        inside = tuple(f"{layer}." for layer in finished)
        done = {n for n in plan.linears if n.startswith(inside) or n in finished}
    return plan._replace(linears={n: p for n, p in plan.linears.items() if n not in done})


def work_of_rest(
    work: Work,
    plan: Plan,
    config: Mapping[str, Any],
    info: Mapping[str, TensorInfo],
    kinds: Mapping[str, list[str]],
    finished: Collection[str],
) -> Work:
    """`work` without what is finished.

    plan: of all linears. kinds: a layer of each kind -> all of them, empty where weights are
    streamed.
    """
    rest = plan_of_rest(plan, finished, work.streamed)
    problems = problems_of(rest, config, work.recipe.calibration.all_experts)
    if work.streamed:
        left = sum(i.nbytes for n, i in info.items() if n not in finished)
        share = left / max(1, sum(i.nbytes for i in info.values()))
        return replace(
            work, problems=problems,
            bytes_before=round(share * work.bytes_before),
            bytes_after=round(share * work.bytes_after),
        )  # fmt: skip
    weights = sum(p.weights * p.count for p in problems)
    share = weights / max(1, sum(p.weights * p.count for p in work.problems))
    return replace(
        work, problems=problems,
        kinds={k: sum(n not in finished for n in names) for k, names in kinds.items()},
        restored={k: sum(n in finished for n in names) for k, names in kinds.items()},
        quantized_bytes=round(share * work.quantized_bytes),
    )  # fmt: skip
