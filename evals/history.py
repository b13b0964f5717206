"""A project's results over time: a series a model and metric, regressions beyond the noise marked.

Points of a series were measured alike: accuracy by one protocol against one base, speeds on one
machine under one load. Each has a range that noise explains: two standard errors about a mean, the
slowest to the fastest of repeated runs. A point has regressed where its whole range is worse than
that of the best point before it, and so do those after it until it is mended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..kernels.errors import UserError
from .results import header
from .summary import Json, comparable, name_of

FORMAT = "lowbit-history"
ERRORS = 2  # standard errors on either side


class Ranged(NamedTuple):
    """A value and what noise alone would make of it."""

    value: float
    low: float
    high: float


class Metric(NamedTuple):
    """words: with the unit. lower: whether less is better. alike: what else has to be the same."""

    words: str
    lower: bool
    read: Callable[[Json], Iterator[tuple[str, Ranged]]]
    on_machine: bool = False


def history(files: Sequence[tuple[str, Json]]) -> Json:
    """The series of results files, each with its name; those of one point alone are left out.

    UserError where nothing was measured twice.
    """
    ordered = sorted(files, key=lambda f: f[1]["created"])
    groups = []
    for key, metric in METRICS.items():
        series = _series(ordered, metric)
        if series:
            groups.append({"metric": key, "words": metric.words, "lower": metric.lower,
                           "series": series})  # fmt: skip
    if not groups:
        raise UserError(
            "these files have nothing in common that was measured twice alike: the same model by "
            "the same protocol, or the same load on the same machine"
        )
    sources = [{"file": n, "producer": r["producer"], "created": r["created"]} for n, r in ordered]
    return {**header("report"), "format": FORMAT, "sources": sources, "groups": groups}


def mark(points: Sequence[Ranged], lower: bool) -> list[bool]:
    """Of each point whether it is worse than the best before it, beyond the noise of both."""
    found, best = list[bool](), None
    for point in points:
        if best is None:
            found.append(False)
            best = point
            continue
        found.append(point.low > best.high if lower else point.high < best.low)
        if (point.value < best.value) == lower:
            best = point
    return found


def _series(files: Sequence[tuple[str, Json]], metric: Metric) -> list[Json]:
    known: dict[str, list[tuple[Ranged, Json]]] = {}
    labels: dict[str, str] = {}
    for name, results in files:
        for row in results["rows"]:
            for what, ranged in metric.read(row):
                label = f"{name_of(row)}, {what}" if what else name_of(row)
                key = json.dumps([label, _alike(results, metric)], sort_keys=True)
                labels[key] = label
                at = {"file": name, "created": results["created"],
                      "version": results["producer"]["version"]}  # fmt: skip
                known.setdefault(key, []).append((ranged, at))
    return [
        {"label": labels[key], "points": _points(found, metric)}
        for key, found in known.items()
        if len(found) > 1
    ]


def _points(found: Sequence[tuple[Ranged, Json]], metric: Metric) -> list[Json]:
    marks = mark([ranged for ranged, _ in found], metric.lower)
    return [
        {**at, **ranged._asdict(), "regressed": regressed}
        for (ranged, at), regressed in zip(found, marks, strict=True)
    ]


def _alike(results: Json, metric: Metric) -> Any:
    """Equal where numbers of the metric may be compared."""
    if not metric.on_machine:
        return None if results["protocol"] is None else comparable(results)
    environment = results["environment"]
    return [environment[key] for key in ("device", "cpu", "threads")]


def _mean(part: str, key: str) -> Callable[[Json], Iterator[tuple[str, Ranged]]]:
    """A mean with its standard error, of a row's `part`."""

    def read(row: Json) -> Iterator[tuple[str, Ranged]]:
        found = row.get(part)
        if found is not None and found[key] is not None:
            error = ERRORS * (found[f"{key}_stderr"] or 0.0)
            yield "", Ranged(found[key], found[key] - error, found[key] + error)

    return read


def _decode(row: Json) -> Iterator[tuple[str, Ranged]]:
    if (found := row.get("speed")) is not None:
        yield "", Ranged(found["decode"], found["decode_min"], found["decode_max"])


def _size(row: Json) -> Iterator[tuple[str, Ranged]]:
    if (found := row["size"]) is not None:
        nbytes = found["file_bytes"]
        yield "", Ranged(nbytes, nbytes, nbytes)


def _served(kind: str, share: str | None = None) -> Callable[[Json], Iterator[tuple[str, Ranged]]]:
    """A number of each load of a row's bench."""

    def read(row: Json) -> Iterator[tuple[str, Ranged]]:
        for served in (row.get("bench") or {"loads": []})["loads"]:
            found = served[kind]
            if found is not None:
                spread = found if share is None else found[share]
                what = f"{served['variant']}, {_load_words(served['load'])}"
                yield what, Ranged(spread["median"], spread["low"], spread["high"])

    return read


def _load_words(load: Json) -> str:
    """What has to be equal for two loads to be one."""
    sent = (
        f"{load['concurrency']} clients" if load["rate"] is None else f"{load['rate']} requests/s"
    )
    lengths = [f"{load[f'{of}_low']}-{load[f'{of}_high']}" for of in ("prompt", "output")]
    return f"{sent}, {load['requests']} of {' to '.join(lengths)} tokens, seed {load['seed']}"


METRICS: dict[str, Metric] = {
    "kld": Metric("mean KLD, nats", True, _mean("divergence", "kld_mean")),
    "perplexity": Metric("perplexity", True, _mean("perplexity", "perplexity")),
    "top1": Metric("share of the same first token", False, _mean("divergence", "top1")),
    "size": Metric("weights file, bytes", True, _size),
    "decode": Metric("decode, tokens/s", False, _decode, on_machine=True),
    "throughput": Metric(
        "output tokens/s of serving", False, _served("output_tokens_per_second"), on_machine=True
    ),
    "ttft": Metric("first token, median, s", True, _served("ttft", "p50"), on_machine=True),
    "tpot": Metric(
        "each token after the first, median, s", True, _served("tpot", "p50"), on_machine=True
    ),
}  # fmt: skip
