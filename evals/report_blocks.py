"""A summary as headings, sentences, tables and figures, each number with its value.

A page is made of these by report_page.py, Markdown by report_markdown.py: what they say is decided
here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .history import FORMAT as HISTORY
from .report_generation import generations
from .report_history import history_blocks
from .report_pieces import (
    Block,
    Cell,
    Figure,
    Heading,
    Piece,
    Sentence,
    Table,
    number,
    with_error,
)
from .report_serving import serving, serving_figures
from .summary import Json

WORST = 5  # linears that are listed


def blocks(summary: Json) -> Iterator[Block]:
    """All that a report shows, in order."""
    if summary["format"] == HISTORY:
        yield from history_blocks(summary)
        yield from _sources(summary, 3)
        return
    several = len(summary["groups"]) > 1
    for i, group in enumerate(summary["groups"]):
        if several:
            yield Heading(2, _title(group))
        yield from _verdicts(group)
        yield Heading(3, "Results")
        yield _results(group["rows"])
        yield from _figures(group, i)
        yield from _details(group)
        yield Heading(3, "Protocol")
        yield from _protocol(group)
    yield from _sources(summary, 2 if several else 3)


def _sources(summary: Json, level: int) -> Iterator[Block]:
    yield Heading(level, "Sources")
    for source in summary["sources"]:
        p = source["producer"]
        words = f"{source['file']}: {p['name']} {p['version']} {p['command']}, {source['created']}"
        yield Sentence([Piece(words)])


def _title(group: Json) -> str:
    p = group["protocol"]
    if p is None:
        return "Not measured on a text"
    base = next((r["label"] for r in group["rows"] if r["is_base"]), None)
    return f"{base or group['rows'][0]['label']}, {p['name'] or p['text']}"


def _verdicts(group: Json) -> Iterator[Block]:
    if group["recommendation"] is not None:
        yield Sentence(_recommendation(group["recommendation"], group["rows"]), strong=True)
    for row in group["rows"]:
        if row["verdict"] is not None:
            yield Sentence(_verdict(row), strong=True)


def _recommendation(found: Json, rows: Sequence[Json]) -> Cell:
    """What to take, with the words that grade it: what fits best may still be far off."""
    asked, nearest = found["asked"], found["nearest"]
    limits = {
        "max_bytes": (" of at most {} MB", ".1f", 1e-6), "max_kld": (" within {} nats", "g", 1),
        "min_speed": (" at {} tokens/s or more", "g", 1),
    }  # fmt: skip
    pieces = [Piece("Recommended" if found["row"] else "None")]
    for name, (words, form, scale) in limits.items():
        if asked[name] is not None:
            before, _, after = words.partition("{}")
            pieces += [Piece(before), *number(asked[name], form, scale), Piece(after)]
    if found["row"]:
        verdict = next((r["verdict"] for r in rows if r["name"] == found["row"]), None)
        return [*pieces, Piece(f": {found['row']}" + (f", {verdict}." if verdict else "."))]
    return [
        *pieces, Piece("; the nearest: "), *number(nearest["bytes"], ".1f", 1e-6), Piece(" MB, "),
        *number(nearest["kld"], ".4f"), Piece(" nats, "), *number(nearest["speed"], ".1f"),
        Piece(" tokens/s."),
    ]  # fmt: skip


def _verdict(row: Json) -> Cell:
    d, ratio = row["divergence"], row["against_base"]
    said = [Piece(f"{row['label']}: ")]
    if ratio is not None and ratio["smaller"] is not None:
        said += [Piece(f"{ratio['smaller']:.1f}×", ratio["smaller"]), Piece(" smaller, ")]
    said += [Piece("KLD "), Piece(f"{d['kld_mean']:.3g}", d["kld_mean"]), Piece(", ")]
    said += [Piece(f"{d['top1']:.0%}", d["top1"]), Piece(" same token")]
    if ratio is not None and ratio["faster"] is not None:
        said += [Piece(", decode "), Piece(f"{ratio['faster']:.1f}×", ratio["faster"])]
    return [*said, Piece(f"; {row['verdict']}.")]


def _at(name: str, key: str, form: str, error: bool = False) -> Callable[[Json], Cell | None]:
    """The cell of a row's `name`.`key`; None where the row has no `name`."""

    def cell(row: Json) -> Cell | None:
        part = row.get(name)
        if part is None:
            return None
        return with_error(part[key], part[f"{key}_stderr"] if error else None, form)

    return cell


COLUMNS: list[tuple[str, Callable[[Json], Cell | None]]] = [
    ("perplexity", _at("perplexity", "perplexity", ".3f", error=True)),
    ("KLD", _at("divergence", "kld_mean", ".5f", error=True)),
    ("top-1", _at("divergence", "top1", ".2%")),
    ("top-5", _at("divergence", "top5_overlap", ".2%")),
    ("RMS of probabilities", _at("divergence", "probability_rms", ".2%")),
    ("file, MB", lambda row: row["size"] and number(row["size"]["file_bytes"], ".1f", 1e-6)),
    ("bits/weight", _at("size", "bits_per_weight", ".2f")),
    ("of linears", _at("size", "quantized_bits_per_weight", ".2f")),
    ("smaller", _at("against_base", "smaller", ".2f")),
    ("decode, tokens/s", _at("speed", "decode", ".1f")),
    ("faster", _at("against_base", "faster", ".2f")),
    ("prefill, tokens/s", _at("speed", "prefill", ".0f")),
    ("peak, MB", lambda row: row.get("speed") and number(row["speed"]["peak_memory"], ".0f", 1e-6)),
    ("made in, s", _at("made", "seconds", ".0f")),
]
QUANTILES = {
    "kld_median": "median", "kld_p90": "90%", "kld_p95": "95%", "kld_p99": "99%",
    "kld_p999": "99.9%", "kld_max": "max",
}  # fmt: skip


def _results(rows: Sequence[Json]) -> Table:
    cells = {title: [cell(row) for row in rows] for title, cell in COLUMNS}
    shown = [t for t, found in cells.items() if any(c and c != [Piece("-")] for c in found)]
    lines = [
        [_named(row), *(cells[title][i] or [Piece("-")] for title in shown)]
        for i, row in enumerate(rows)
    ]
    return Table(["model", *shown], lines)


def _named(row: Json) -> Cell:
    words = row["label"] + (" (base)" if row["is_base"] else "")
    words += f", cache {row['kv']}" if row.get("kv") else ""
    return [Piece(f"{words}, by {row['engine']['name']}" if row.get("engine") else words)]


def _figures(group: Json, place: int) -> Iterator[Block]:
    compared = [row for row in group["rows"] if row.get("divergence")]
    if any(row["size"] for row in compared):
        yield Figure("size", "Divergence against size; the line joins what nothing beats", place)
    if any(row.get("speed") for row in compared):
        yield Figure("speed", "Divergence against decode speed", place)
    if any(row["throughput"] for row in compared):
        yield Figure("throughput", "Divergence against output tokens/s of serving", place)
    if compared:
        yield Figure("quantiles", "Divergence of the worst positions", place)
    if any(row["divergence"].get("histogram") for row in compared):
        yield Figure("histogram", "How many positions diverge how far", place)
    if any(row["layers"] for row in group["rows"]):
        yield Figure("layers", "Calibration error and bits by decoder layer", place)
    yield from serving_figures(group["rows"], place)


def _details(group: Json) -> Iterator[Block]:
    compared = [row for row in group["rows"] if row.get("divergence")]
    floor = group["noise_floor"]
    if compared:
        yield Heading(3, "Quantiles of the divergence")
        lines = [_quantiles(_named(row), row["divergence"]) for row in compared]
        lines += [] if floor is None else [_quantiles([Piece("noise floor")], floor)]
        yield Table(["model", "mean", *QUANTILES.values()], lines)
        yield Heading(3, "By how sure the base is")
        for row in compared:
            yield Sentence(_named(row))
            yield _confidence(row["divergence"]["confidence"])
    if tasks := [(row, task) for row in group["rows"] for task in row.get("tasks") or []]:
        yield Heading(3, "Tasks")
        yield _tasks(tasks)
    yield from generations(group["rows"])
    for row in group["rows"]:
        if row.get("bench") is not None:
            yield from serving(row)
    if (worst := _worst(group["rows"])).rows:
        yield Heading(3, "Linears with the largest errors")
        yield worst


def _quantiles(name: Cell, d: Json) -> list[Cell]:
    mean = with_error(d["kld_mean"], d["kld_mean_stderr"], ".5f")
    return [name, mean, *(number(d[key], ".4f") for key in QUANTILES)]


def _confidence(found: Sequence[Json]) -> Table:
    lines = [
        [
            [*number(b["low"], ".0%"), Piece(" to "), *number(b["high"], ".0%")],
            number(b["positions"], ","), number(b["kld_mean"], ".4f"), number(b["top1"], ".1%"),
        ]
        for b in found
    ]  # fmt: skip
    return Table(["base's highest probability", "positions", "KLD", "top-1"], lines)


def _tasks(tasks: Sequence[tuple[Json, Json]]) -> Table:
    lines = []
    for row, t in tasks:
        p = t["paired"] or {}
        lines.append([
            _named(row), [Piece(t["task"])], number(t["questions"], ","),
            with_error(t["accuracy"], t["accuracy_stderr"], ".2%"),
            with_error(t["accuracy_norm"], t["accuracy_norm_stderr"], ".2%"),
            number(p.get("only_base"), ","), number(p.get("only_model"), ","),
            number(p.get("p_value"), ".3f"),
        ])  # fmt: skip
    headings = ["model", "task", "questions", "accuracy", "by length", "only the base right"]
    return Table([*headings, "only the model right", "p (McNemar)"], lines)


def _worst(rows: Sequence[Json]) -> Table:
    known = [
        (linear["relative_error"], linear, row)
        for row in rows
        for linear in row.get("linears") or []
        if linear["relative_error"] is not None
    ]
    worst = sorted(known, key=lambda entry: -entry[0])[:WORST]
    lines = [
        [_named(row), [Piece(linear["name"])], number(linear["bits"], ".2f"), number(e, ".2e")]
        for e, linear, row in worst
    ]
    return Table(["model", "linear", "bits", "relative error"], lines)


def _protocol(group: Json) -> Iterator[Block]:
    p, e = group["protocol"], group["environment"]
    if p is not None:
        w = p["windowing"]
        yield Sentence([Piece(f"text: {p['text_description']}; sha256 {p['text_sha256']}")])
        yield Sentence([
            Piece(f"protocol {p['name']}; windows: " if p["name"] else "windows: "),
            *number(p["windows"], "d"), Piece(" of ctx "), *number(w["ctx"], "d"),
            Piece(", stride "), *number(w["stride"], "d"), Piece(", skip "),
            *number(w["skip"], "d"),
            Piece(f", BOS {w['bos']}; "), *number(p["scored_tokens"], ","),
            Piece(" tokens scored, "), *number(p["positions"], ","), Piece(" positions"),
        ])  # fmt: skip
        yield Sentence([Piece(f"dtype {p['dtype']}; tokenizer {p['tokenizer']}")])
    yield Sentence([
        Piece(f"device {e['device']}, threads: "), *number(e["threads"], "d"),
        Piece(f", {e['cpu']}, {e['system']}, python {e['python']}"),
        *(Piece(f", {name} {v}") for name, v in e["packages"].items()),
    ])  # fmt: skip
    for row in group["rows"]:
        yield Sentence([Piece(f"{row['label']}: {row['path']} (from {row['source']})")])
    for definition in group["definitions"]:
        yield Sentence([Piece(definition)])
