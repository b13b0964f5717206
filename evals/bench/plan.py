"""What a bench is to run, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...kernels.errors import UserError
from .conversations import Encode, draw_exchanges, plan_of, read_exchanges
from .latency import SLO
from .load import Arrivals, ClosedLoop, Lengths, Load, LoadPlan, draw_load
from .served import Loads

DECODED = 32  # new tokens of a sweep's decode


@dataclass(frozen=True)
class BenchPlan:
    """arrivals: each is a load of its own. lengths: a file of conversations, in place of prompt and
    output. sweep: batches and contexts."""

    arrivals: tuple[Arrivals, ...]
    requests: int = 32
    prompt: Lengths = Lengths(512, 512)
    output: Lengths = Lengths(128, 128)
    lengths: Path | None = None
    shared_prefix: int = 0
    slo: SLO | None = None
    sweep: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UserError(f"a bench repeats its runs at least once, got {self.repeats}")

    @property
    def at_once(self) -> int:
        """The most requests that the plan itself sends at once; 0 where they come by themselves."""
        closed = [a.concurrency for a in self.arrivals if isinstance(a, ClosedLoop)]
        return max([0, *closed, *(self.sweep[0] if self.sweep else ())])

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output; of a file nothing is known."""
        sweep = max(self.sweep[1]) + DECODED if self.sweep else 0
        load = 0 if self.lengths or not self.arrivals else self.prompt.high + self.output.high
        return max(sweep, load)


def parse_sweep(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of "1,4,16x128,1024": batches and contexts."""
    parts = text.split("x")
    try:
        found = [tuple(int(n) for n in part.split(",")) for part in parts]
    except ValueError:
        found = []
    if len(found) != 2 or not all(n >= 1 for numbers in found for n in numbers):
        raise UserError(f"--sweep is BATCHESxCONTEXTS, as 1,4,16x128,1024, got '{text}'")
    return found[0], found[1]


def check_plan(plan: BenchPlan, explain: bool) -> None:
    """UserError where there is nothing to run, or nothing to explain."""
    if not plan.arrivals and plan.sweep is None:
        raise UserError("nothing to run: give --concurrency, --rate or --sweep")
    if explain and plan.sweep is None:
        raise UserError("--explain explains the phases of a --sweep: give one, as 1,8x512")


def check_room(plan: BenchPlan, positions: int | None, model: str) -> None:
    """UserError where a prompt with its answer is longer than the model takes. positions: how many,
    None for any number; model: in words."""
    if positions is None:
        return
    if plan.sweep is not None and (context := max(plan.sweep[1])) + DECODED > positions:
        raise UserError(
            f"--sweep with contexts of {context} needs {context + DECODED} positions ({DECODED} "
            f"are decoded), and {model} has {positions}: {positions - DECODED} would do"
        )
    if plan.arrivals and plan.lengths is None and plan.longest > positions:
        raise UserError(
            f"prompts of {plan.prompt.high} and answers of {plan.output.high} tokens need "
            f"{plan.prompt.high + plan.output.high} positions, and {model} has {positions}: lower "
            "--prompt or --output"
        )


def make_loads(
    plan: BenchPlan, tokens: Sequence[int], encode: Encode, longest: int, source: str
) -> list[Loads]:
    """A load for each of the plan's arrivals. tokens: of the text that prompts are cut from;
    longest: tokens that the model takes; source: the text, in words."""
    found = []
    for arrivals in plan.arrivals:
        drawn = LoadPlan(
            plan.requests, arrivals, plan.prompt, plan.output, plan.shared_prefix, plan.seed, source
        )
        if plan.lengths is None:
            found.append(Loads(drawn, _from_text(drawn, tokens)))
            continue
        exchanges = read_exchanges(plan.lengths, encode, longest)
        drawn = replace(plan_of(exchanges, drawn), source=plan.lengths.name)
        found.append(Loads(drawn, lambda run, p=drawn, e=exchanges: draw_exchanges(p, e, run)))
    return found


def sweep_loads(
    plan: BenchPlan, tokens: Sequence[int], source: str
) -> dict[tuple[int, int], tuple[Loads, Loads]]:
    """Of each batch and context, the loads of prefill and of decode."""
    if plan.sweep is None:
        return {}

    def loads(batch: int, context: int, new: int) -> Loads:
        lengths = Lengths(context, context), Lengths(new, new)
        drawn = LoadPlan(batch, ClosedLoop(batch), *lengths, seed=plan.seed, source=source)
        return Loads(drawn, _from_text(drawn, tokens))

    return {
        (batch, context): (loads(batch, context, 1), loads(batch, context, DECODED))
        for batch in plan.sweep[0]
        for context in plan.sweep[1]
    }


def _from_text(plan: LoadPlan, tokens: Sequence[int]) -> Callable[[int], Load]:
    return lambda run: draw_load(plan, tokens, run)
