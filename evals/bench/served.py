"""Loads on one or several targets, by turns: medians with their spread, ratios of paired runs.

Every target gets the same loads in every round, so that a busy minute meets all of them; the order
changes from round to round. A first round is not counted. What fails its check has no numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .checks import Check
from .drive import Clock, Target, drive
from .latency import SLO, LoadResult, Quantiles, Spread, Timeline, load_result, phases, spread
from .load import ClosedLoop, Load, LoadPlan

Checker = Callable[[Load, Sequence[Timeline]], Check]
RATES = ("output_tokens_per_second", "requests_per_second", "goodput")
LATENCIES = ("ttft", "tpot", "itl")


class Loads(NamedTuple):
    """A plan, and how the load of run number n is made of it."""

    plan: LoadPlan
    make: Callable[[int], Load]


class QuantileSpreads(NamedTuple):
    p50: Spread
    p90: Spread
    p99: Spread


class Served(NamedTuple):
    """A variant under a load, over `repeats` runs; no numbers where `check.failed`."""

    variant: str
    load: dict[str, Any]
    repeats: int
    check: Check
    ttft: QuantileSpreads | None = None
    tpot: QuantileSpreads | None = None
    itl: QuantileSpreads | None = None
    output_tokens_per_second: Spread | None = None
    requests_per_second: Spread | None = None
    goodput: Spread | None = None


class Ratio(NamedTuple):
    """A variant's numbers over those of `against` in the same round: of tokens a second, above 1 is
    faster; of seconds (medians over requests), below 1 is."""

    variant: str
    against: str
    load: dict[str, Any]
    output_tokens_per_second: Spread
    ttft: Spread
    tpot: Spread | None


class Cell(NamedTuple):
    """Tokens a second of `batch` requests at once: prefill of prompts of `context` tokens, and
    decode behind them."""

    variant: str
    batch: int
    context: int
    repeats: int
    check: Check
    prefill: Spread | None = None
    decode: Spread | None = None


class Sides(NamedTuple):
    """What is measured side by side. checkers: of each target's runs; warm: whether they have run
    such loads already. clock: seconds."""

    targets: Mapping[str, Target]
    checkers: Mapping[str, Checker]
    warm: bool = False
    clock: Clock = time.perf_counter


class Runs:
    """The counted runs of each side under one load. checks: of the last run of each; a target whose
    check fails is not run again."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self.timelines: dict[str, list[list[Timeline]]] = {name: [] for name in sides.targets}
        self.checks: dict[str, Check] = {}

    async def go(self, loads: Loads, repeats: int) -> None:
        """Run number 0 warms up and is not counted."""
        for run in range(1 if self._sides.warm else 0, repeats + 1):
            load = loads.make(run)
            for name in self._order(run):
                found = await drive(self._sides.targets[name], load, self._sides.clock)
                self.checks[name] = self._sides.checkers[name](load, found)
                if run and self.stands(name):
                    self.timelines[name].append(found)

    def stands(self, name: str) -> bool:
        """Whether no run of a target has failed."""
        return name not in self.checks or self.checks[name].failed is None

    def _order(self, run: int) -> list[str]:
        names = [name for name in self._sides.targets if self.stands(name)]
        return names if run % 2 else names[::-1]


async def measure_load(
    sides: Sides, loads: Loads, repeats: int, slo: SLO | None = None
) -> tuple[list[Served], list[Ratio]]:
    """Every side under the load, and the others against the first."""
    runs = Runs(sides)
    await runs.go(loads, repeats)
    results = {
        name: [load_result(r, slo) for r in found]
        for name, found in runs.timelines.items()
        if runs.stands(name)
    }
    told = describe(loads.plan)
    served = [
        _served(name, told, repeats, runs.checks[name], results.get(name, []))
        for name in sides.targets
    ]
    first = next(iter(sides.targets))
    pairs = [
        _ratio(name, first, told, own, results[first])
        for name, own in results.items()
        if name != first and first in results
    ]
    return served, pairs


async def measure_cells(sides: Sides, loads: tuple[Loads, Loads], repeats: int) -> list[Cell]:
    """A cell of a sweep, of each side. loads: whose answers are one token, for prefill, and longer,
    for decode; both of one batch that comes at once."""
    prefill, decode = Runs(sides), Runs(sides)
    await prefill.go(loads[0], repeats)
    await decode.go(loads[1], repeats)
    return [_cell(name, loads[0].plan, repeats, prefill, decode) for name in sides.targets]


def _cell(name: str, plan: LoadPlan, repeats: int, prefill: Runs, decode: Runs) -> Cell:
    broken = next((r for r in (prefill, decode) if not r.stands(name)), None)
    check = (broken or decode).checks[name]
    cell = Cell(name, plan.requests, plan.prompt.high, repeats, check)
    if broken:
        return cell
    rates = [phases(run).prefill for run in prefill.timelines[name]]
    behind = [phases(run).decode for run in decode.timelines[name]]
    return cell._replace(prefill=spread(rates), decode=_spread_of(behind))


def describe(plan: LoadPlan) -> dict[str, Any]:
    """A plan as a results file has it."""
    closed = isinstance(plan.arrivals, ClosedLoop)
    return {
        "arrivals": "closed" if closed else "poisson",
        "concurrency": plan.arrivals.concurrency if isinstance(plan.arrivals, ClosedLoop) else None,
        "rate": None if isinstance(plan.arrivals, ClosedLoop) else plan.arrivals.rate,
        "requests": plan.requests,
        "prompt_low": plan.prompt.low,
        "prompt_high": plan.prompt.high,
        "output_low": plan.output.low,
        "output_high": plan.output.high,
        "shared_prefix": plan.shared_prefix,
        "seed": plan.seed,
        "source": plan.source,
    }


def _served(
    name: str, load: dict[str, Any], repeats: int, check: Check, results: Sequence[LoadResult]
) -> Served:
    bare = Served(name, load, repeats, check)
    if not results:
        return bare
    rates = {rate: _spread_of([getattr(r, rate) for r in results]) for rate in RATES}
    times = {kind: _quantile_spreads([getattr(r, kind) for r in results]) for kind in LATENCIES}
    return bare._replace(**rates, **times)


def _spread_of(values: Sequence[float | None]) -> Spread | None:
    known = [v for v in values if v is not None]
    return spread(known) if known else None


def _quantile_spreads(found: Sequence[Quantiles | None]) -> QuantileSpreads | None:
    known = [q for q in found if q is not None]
    if not known:
        return None
    return QuantileSpreads(*(spread(values) for values in zip(*known, strict=True)))


def _ratio(
    name: str,
    against: str,
    load: dict[str, Any],
    own: Sequence[LoadResult],
    other: Sequence[LoadResult],
) -> Ratio:
    pairs = list(zip(own, other, strict=True))
    tpots = [a.tpot.p50 / b.tpot.p50 for a, b in pairs if a.tpot and b.tpot and b.tpot.p50]
    return Ratio(
        name,
        against,
        load,
        spread([a.output_tokens_per_second / b.output_tokens_per_second for a, b in pairs]),
        spread([a.ttft.p50 / b.ttft.p50 for a, b in pairs]),
        spread(tpots) if tpots else None,
    )
