"""From the times of requests to what serving is judged by. Pure: seconds in, seconds out.

TTFT: from when a request was due to its first piece of output; what waits for a client or in a
queue is in it. TPOT: of one request, from its first piece to its last over its tokens after the
first. ITL: between two pieces of one request, as who reads them sees it (a piece may be several
tokens). Quantiles are linear between neighbours.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.errors import UserError

QUANTILES = (0.5, 0.9, 0.99)
UNITS = {"ms": 1e-3, "s": 1.0}


class Timeline(NamedTuple):
    """One request. due: when it was to be sent; times: of each piece of output; tokens: of all
    pieces; token_ids: where they are known; error: why it failed. Seconds of one clock."""

    due: float
    times: tuple[float, ...]
    tokens: int
    prompt: tuple[int, ...] = ()
    token_ids: tuple[int, ...] | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    @property
    def tpot(self) -> float | None:
        """None where there is one token."""
        if self.tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.due


class Quantiles(NamedTuple):
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class SLO:
    """Seconds that a request may take at most, None: any. e2e: to its last token."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Of "ttft=500ms,tpot=50ms"."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not equals or name not in ("ttft", "tpot", "e2e") or name in limits:
                raise UserError(f"--slo is ttft=500ms,tpot=50ms,e2e=10s or some of it, got {text}")
            limits[name] = parse_seconds(value)
        return cls(**limits)

    def met(self, request: Timeline) -> bool:
        limits = (
            (self.ttft, request.ttft), (self.tpot, request.tpot), (self.e2e, request.seconds),
        )  # fmt: skip
        return all(limit is None or taken is None or taken <= limit for limit, taken in limits)


class LoadResult(NamedTuple):
    """Of one run of a load. seconds: from the first request due to the last token. Per second:
    output tokens, requests, and of those that met the SLO (None without one). tpot, itl: None where
    every answer is one token or one piece."""

    requests: int
    output_tokens: int
    seconds: float
    ttft: Quantiles
    tpot: Quantiles | None
    itl: Quantiles | None
    output_tokens_per_second: float
    requests_per_second: float
    goodput: float | None


def parse_seconds(text: str) -> float:
    """Of "500ms" or "2s"."""
    for unit, size in UNITS.items():
        number = text.removesuffix(unit)
        if number != text:
            try:
                value = float(number) * size
            except ValueError:
                break
            if 0 < value < math.inf:
                return value
    raise UserError(f"a time is a number above 0 with its unit, as 500ms or 2s, got '{text}'")


def quantile(values: Sequence[float], share: float) -> float:
    """Of values in rising order: linear between the two neighbours of (n - 1) * share."""
    at = (len(values) - 1) * share
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def quantiles(values: Iterable[float | None]) -> Quantiles | None:
    """None of no values."""
    known = sorted(v for v in values if v is not None)
    return Quantiles(*(quantile(known, share) for share in QUANTILES)) if known else None


def load_result(requests: Sequence[Timeline], slo: SLO | None = None) -> LoadResult:
    """Of requests that all have an answer."""
    assert requests and all(r.times and r.error is None for r in requests)
    seconds = max(r.times[-1] for r in requests) - min(r.due for r in requests)
    tokens = sum(r.tokens for r in requests)
    ttft = quantiles(r.ttft for r in requests)
    assert ttft is not None
    return LoadResult(
        requests=len(requests),
        output_tokens=tokens,
        seconds=seconds,
        ttft=ttft,
        tpot=quantiles(r.tpot for r in requests),
        itl=quantiles(itertools.chain.from_iterable(r.itl for r in requests)),
        output_tokens_per_second=tokens / seconds,
        requests_per_second=len(requests) / seconds,
        goodput=None if slo is None else sum(map(slo.met, requests)) / seconds,
    )


class Phases(NamedTuple):
    """Tokens a second of a batch that began together. prefill: of prompts, to the last request's
    first token; decode: of output, from there to the first request's last token; None where no
    token falls between."""

    prefill: float
    decode: float | None


def phases(requests: Sequence[Timeline]) -> Phases:
    """Of requests whose pieces are single tokens or parts of equal size."""
    begun = max(r.times[0] for r in requests)
    ended = min(r.times[-1] for r in requests)
    prompts = sum(len(r.prompt) for r in requests)
    prefill = prompts / (begun - min(r.due for r in requests))
    between = sum(
        r.tokens * sum(begun < t <= ended for t in r.times) / len(r.times) for r in requests
    )
    return Phases(prefill, between / (ended - begun) if ended > begun and between else None)


class Spread(NamedTuple):
    """Of repeated runs."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
