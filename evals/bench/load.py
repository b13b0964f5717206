"""A load: which prompts come when, and how much is asked of each. Drawn from a seed, nothing else.

Prompts are cut from a text's tokens at places drawn at random, so that routers, proposers and
samplers see what they are made for. Two jobs of one load begin alike only where `shared_prefix`
says so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.errors import UserError


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each of which asks again when it has its answer."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UserError(f"concurrency must be at least 1, got {self.concurrency}")

    def __str__(self) -> str:
        return f"clients: {self.concurrency}"


@dataclass(frozen=True)
class Poisson:
    """Requests that come by themselves, `rate` a second on average, however many wait."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise UserError(f"the rate must be above 0 requests/s, got {self.rate}")

    def __str__(self) -> str:
        return f"requests/s: {self.rate:g}"


Arrivals = ClosedLoop | Poisson


@dataclass(frozen=True)
class Lengths:
    """Of tokens, each from `low` to `high` equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise UserError(f"lengths go from 1 or more upwards, got {self.low}-{self.high}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Of "512" or "256-1024"."""
        low, _, high = text.partition("-")
        try:
            return cls(int(low), int(high or low))
        except ValueError as e:
            raise UserError(f"a length is a number or LOW-HIGH, as 512 or 256-1024: {text}") from e


class Job(NamedTuple):
    """One request. output: tokens that are asked for. due: seconds after the load's start; None:
    when a client is free."""

    prompt: tuple[int, ...]
    output: int
    due: float | None = None


class Load(NamedTuple):
    jobs: tuple[Job, ...]
    arrivals: Arrivals


@dataclass(frozen=True)
class LoadPlan:
    """What loads are drawn by. shared_prefix: tokens that all prompts of a load begin with, within
    their length. source: of prompts and lengths, in words."""

    requests: int
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0
    seed: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise UserError(f"a load needs at least 1 request, got {self.requests}")
        if not 0 <= self.shared_prefix < self.prompt.low:
            raise UserError(
                f"the shared prefix must be shorter than every prompt ({self.prompt.low}), got "
                f"{self.shared_prefix}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return self.prompt.high + self.output.high


def draw_load(plan: LoadPlan, tokens: Sequence[int], run: int) -> Load:
    """The load of run number `run`: the same for the same numbers, other prompts for another.

    UserError where the text has fewer tokens than prompts and their places need.
    """
    draw = random.Random(f"{plan.seed} {run}")
    if len(tokens) < plan.prompt.high + 1:
        raise UserError(
            f"the text has {len(tokens)} tokens, too few for prompts of {plan.prompt.high}: "
            "give a longer --text"
        )
    prefix = _cut(draw, tokens, plan.shared_prefix)
    shapes = [_shape(draw, plan) for _ in range(plan.requests)]
    prompts = [prefix + _cut(draw, tokens, p - plan.shared_prefix) for p, _ in shapes]
    return with_arrivals([(p, o) for p, (_, o) in zip(prompts, shapes, strict=True)], plan, draw)


def with_arrivals(
    asked: Sequence[tuple[tuple[int, ...], int]], plan: LoadPlan, draw: random.Random
) -> Load:
    """Prompts and lengths of output as a load, each with its time."""
    times = arrival_times(plan.arrivals, len(asked), draw)
    jobs = [Job(p, o, due) for (p, o), due in zip(asked, times, strict=True)]
    return Load(tuple(jobs), plan.arrivals)


def arrival_times(arrivals: Arrivals, count: int, draw: random.Random) -> list[float | None]:
    """Seconds after the start; the gaps of a Poisson process are exponential."""
    if isinstance(arrivals, ClosedLoop):
        return [None] * count
    now, times = 0.0, list[float | None]()
    for _ in range(count):
        now += draw.expovariate(arrivals.rate)
        times.append(now)
    return times


def _shape(draw: random.Random, plan: LoadPlan) -> tuple[int, int]:
    return (
        draw.randint(plan.prompt.low, plan.prompt.high),
        draw.randint(plan.output.low, plan.output.high),
    )


def _cut(draw: random.Random, tokens: Sequence[int], length: int) -> tuple[int, ...]:
    begin = draw.randint(0, len(tokens) - length)
    return tuple(tokens[begin : begin + length])
