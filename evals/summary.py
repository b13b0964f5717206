"""Several results files as one summary: what a report shows, and nothing that is not in it.

Rows measured by one protocol against one base stand together, since divergences by different
windows or texts cannot be compared. What follows from two rows (how much smaller, how much faster)
is worked out here, so that a page only shows. The summary holds plain JSON values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import header

Json = dict[str, Any]

FORMAT = "lowbit-report"
GENERIC = ("base", "model", "original")  # names of rows that say nothing outside their file
GRADES = (  # of a mean divergence in nats, up to which
    (0.01, "hardly to be told from the original"),
    (0.05, "close to the original"),
    (0.2, "noticeably different from the original"),
    (math.inf, "far from the original"),
)
WITHIN_NOISE = "no further from the original than bfloat16 is"


def summarize(files: Sequence[tuple[str, Json]]) -> Json:
    """The summary of results files, each with its name: sources, and groups of comparable rows."""
    groups: dict[str, Json] = {}
    made: dict[str, Json] = {}
    for name, results in files:
        if results["protocol"] is None:
            for row in results["rows"]:
                _merge(made.setdefault(row["path"], {"source": name}), row)
            continue
        group = groups.setdefault(comparable(results), _group(results))
        group["noise_floor"] = group["noise_floor"] or results.get("noise_floor")
        _add(group["rows"], results, name)
    measured = [row for group in groups.values() for row in group["rows"]]
    for row in measured:
        _merge(row, made.get(row["path"], {}))
    found = list(groups.values())
    rest = [row for path, row in made.items() if path not in {r["path"] for r in measured}]
    if rest:
        unmeasured = _group(next(r for _, r in files if r["protocol"] is None))
        found.append({**unmeasured, "rows": rest})
    for group in found:
        _derive(group)
    sources = [
        {"file": name, "producer": r["producer"], "created": r["created"]} for name, r in files
    ]
    return {**header("report"), "format": FORMAT, "sources": sources, "groups": found}


def _merge(row: Json, other: Json) -> None:
    """Give `row` what it lacks and `other`, of the same checkpoint, has."""
    for key, value in other.items():
        row[key] = row.get(key) or value


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, loss), both better when lower, that no other one beats in one
    without being worse in the other; by rising cost."""
    ordered = sorted(range(len(points)), key=lambda i: (points[i], i))
    front, lowest = [], math.inf
    for i in ordered:
        if points[i][1] < lowest:
            front.append(i)
            lowest = points[i][1]
    return front


def grade(kld: float, noise_floor: float | None) -> str:
    """A mean divergence in words."""
    if noise_floor is not None and kld <= noise_floor:
        return WITHIN_NOISE
    return next(words for limit, words in GRADES if kld < limit)


def comparable(results: Json) -> str:
    """Equal for results whose numbers can be compared."""
    p = results["protocol"]
    base = next((r["path"] for r in results["rows"] if r["name"] == p["base"]), None)
    kept = ("text_sha256", "windowing", "windows", "scored_tokens", "dtype")
    return json.dumps([base, *(p[key] for key in kept)], sort_keys=True)


def _group(results: Json) -> Json:
    return {
        "protocol": results["protocol"],
        "environment": results["environment"],
        "definitions": results.get("definitions", []),
        "noise_floor": results.get("noise_floor"),
        "recommendation": results.get("recommendation"),
        "rows": [],
    }


def _add(rows: list[Json], results: Json, source: str) -> None:
    """Put the results' rows behind `rows`; the base once, with the speed where one file has it."""
    base = results["protocol"]["base"]
    for row in results["rows"]:
        is_base = row["name"] == base
        first = next((r for r in rows if r["is_base"]), None) if is_base else None
        if first is None:
            rows.append({**row, "source": source, "is_base": is_base})
        else:
            first["speed"] = first.get("speed") or row.get("speed")
            first["tasks"] = first.get("tasks") or row.get("tasks")


def _derive(group: Json) -> None:
    """Labels, ratios to the base, verdicts and Pareto fronts; rows in order of their size, equal
    ones by divergence and name."""
    rows = group["rows"]
    for row in rows:
        row.setdefault("is_base", False)
    rows.sort(key=_order)
    _label(rows)
    base = rows[0] if rows and rows[0]["is_base"] else None
    floor = group["noise_floor"]
    for row in rows:
        row["against_base"] = None if base is None or row is base else _ratios(row, base)
        kld = (row.get("divergence") or {}).get("kld_mean")
        row["verdict"] = None if kld is None else grade(kld, floor and floor["kld_mean"])
        row["layers"] = layer_means(row.get("linears") or [])
        row["throughput"] = best_throughput(row.get("bench"))
    group["pareto"] = {
        "size": _front(rows, lambda r: r["size"] and r["size"]["file_bytes"]),
        "speed": _front(rows, lambda r: -r["speed"]["decode"] if r.get("speed") else None),
        "throughput": _front(rows, lambda r: -r["throughput"] if r["throughput"] else None),
    }


def _order(row: Json) -> tuple[Any, ...]:
    nbytes = (row["size"] or {}).get("file_bytes", 0)
    kld = (row.get("divergence") or {}).get("kld_mean", math.inf)
    return not row["is_base"], -nbytes, kld, name_of(row), row["path"]


def best_throughput(bench: Json | None) -> float | None:
    """Output tokens a second under the load where there were most; None where none was measured."""
    loads = [] if bench is None else bench["loads"]
    rates = [r["median"] for load in loads if (r := load["output_tokens_per_second"]) is not None]
    return max(rates, default=None)


def name_of(row: Json) -> str:
    """What a row is called outside its file."""
    return Path(row["path"]).name if row["name"] in GENERIC else row["name"]


def _label(rows: list[Json]) -> None:
    for row in rows:
        name = name_of(row)
        taken = {r.get("label") for r in rows}
        row["label"] = name if name not in taken else f"{name} ({row['path']})"


def _ratios(row: Json, base: Json) -> Json:
    """smaller: the base's file over the row's; faster: of decode; perplexity: of the two."""
    speeds = row.get("speed"), base.get("speed")
    sizes = row["size"], base["size"]
    lost = row.get("divergence")
    return {
        "smaller": sizes[1]["file_bytes"] / max(sizes[0]["file_bytes"], 1) if all(sizes) else None,
        "faster": speeds[0]["decode"] / speeds[1]["decode"] if all(speeds) else None,  # type: ignore[index]
        "perplexity": None if lost is None else math.exp(min(lost["nll_difference"], 700)),
    }


def _front(rows: list[Json], cost: Any) -> list[str]:
    """Labels of the rows that no other beats in cost and divergence."""
    known = [r for r in rows if r.get("divergence") and cost(r) is not None]
    points = [(cost(r), r["divergence"]["kld_mean"]) for r in known]
    return [known[i]["label"] for i in pareto_front(points)]


def layer_means(linears: Sequence[Json]) -> list[Json]:
    """Of each decoder layer the mean bits of its linears and the mean of their errors (None where
    none is known); linears outside of the layers are left out."""
    layers: dict[int, list[Json]] = {}
    for linear in linears:
        number = next((part for part in linear["name"].split(".") if part.isdecimal()), None)
        if number is not None:
            layers.setdefault(int(number), []).append(linear)
    return [
        {
            "layer": layer,
            "bits": _mean([found["bits"] for found in held]),
            "relative_error": _mean(
                [e for found in held if (e := found["relative_error"]) is not None]
            ),
        }
        for layer, held in sorted(layers.items())
    ]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
