"""What a report says of a row's bench: loads, paired runs, sweep, memory, the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .report_pieces import Block, Cell, Figure, Heading, Piece, Sentence, Table, number
from .summary import Json

MS, MB = 1e3, 1e-6


def serving(row: Json) -> Iterator[Block]:
    """All of a row's bench."""
    bench = row["bench"]
    yield Heading(3, f"Serving: {row['label']}")
    yield Sentence([Piece(bench["engine"]), *_slo(bench["slo"])])
    for variant, options in bench["options"].items():
        if options:
            told = ", ".join(f"{key} {value}" for key, value in options.items())
            yield Sentence([Piece(f"{variant}: {told}")])
    yield from _failures([*bench["loads"], *bench["sweep"]])
    if bench["loads"]:
        yield _loads(bench["loads"])
        yield from _sources(bench["loads"])
    if bench["ratios"]:
        yield _ratios(bench["ratios"])
    if bench["sweep"]:
        yield _sweep(bench["sweep"])
    if bench["memory"]:
        yield _memory(bench["memory"])
    if bench["roofline"] is not None:
        yield from _roofline(bench["roofline"])


def serving_figures(rows: Sequence[Json], place: int) -> Iterator[Block]:
    """Of a group's rows: where there are several loads, and where memory is known."""
    benches = [row["bench"] for row in rows if row.get("bench")]
    if any(len(curve) > 1 for bench in benches for curve in load_curves(bench).values()):
        yield Figure("latency", "Median and 99% of latencies against the load", place)
    if any(bench["memory"] for bench in benches):
        yield Figure("memory", "What memory was for, at most", place)


def load_curves(bench: Json) -> dict[tuple[str, str], list[Json]]:
    """The loads with numbers of each variant and kind of arrivals, by rising load."""
    curves: dict[tuple[str, str], list[Json]] = {}
    for served in bench["loads"]:
        if served["ttft"] is not None:
            curves.setdefault((served["variant"], served["load"]["arrivals"]), []).append(served)
    return {key: sorted(found, key=load_size) for key, found in curves.items()}


def load_size(served: Json) -> float:
    """Clients, or requests a second."""
    load = served["load"]
    return load["concurrency"] if load["rate"] is None else load["rate"]


def _slo(slo: Json | None) -> Cell:
    if slo is None:
        return []
    named = {"ttft": "first token", "tpot": "each token after it", "e2e": "the whole answer"}
    told = [Piece("; goodput counts requests within")]
    for key, words in named.items():
        if slo[key] is not None:
            told += [Piece(f", {words}: "), *number(slo[key], ".0f", MS), Piece(" ms")]
    return told


def _failures(found: Sequence[Json]) -> Iterator[Block]:
    for one in found:
        if one["check"]["failed"] is not None:
            yield Sentence([Piece(f"{one['variant']}: no numbers, {one['check']['failed']}")], True)


def _load(load: Json) -> Cell:
    if load["rate"] is None:
        return [Piece("clients: "), *number(load["concurrency"], "d")]
    return [Piece("requests/s: "), *number(load["rate"], "g")]


def _lengths(load: Json, of: str) -> Cell:
    low, high = load[f"{of}_low"], load[f"{of}_high"]
    return number(low, "d") if low == high else [
        *number(low, "d"), Piece(" to "), *number(high, "d")
    ]  # fmt: skip


def _quantile(served: Json, kind: str, share: str) -> Cell:
    known = served[kind]
    return number(None if known is None else known[share]["median"], ".1f", MS)


def _spread(value: Json | None, form: str) -> Cell:
    """The median, the lowest and the highest."""
    if value is None:
        return number(None, form)
    low, high = number(value["low"], form), number(value["high"], form)
    return [*number(value["median"], form), Piece(" ("), *low, Piece(" to "), *high, Piece(")")]


def _loads(loads: Sequence[Json]) -> Table:
    timed = [("TTFT", "ttft", "p50"), ("TTFT", "ttft", "p90"), ("TTFT", "ttft", "p99"),
             ("TPOT", "tpot", "p50"), ("TPOT", "tpot", "p90"), ("TPOT", "tpot", "p99"),
             ("ITL", "itl", "p50"), ("ITL", "itl", "p90"), ("ITL", "itl", "p99")]  # fmt: skip
    lines = []
    for served in loads:
        lines.append([
            [Piece(served["variant"])], _load(served["load"]),
            *(_quantile(served, kind, share) for _, kind, share in timed),
            _spread(served["output_tokens_per_second"], ".1f"),
            _spread(served["requests_per_second"], ".2f"), _spread(served["goodput"], ".2f"),
        ])  # fmt: skip
    headings = [f"{name} {share}, ms" for name, _, share in timed]
    rates = ["output tokens/s", "requests/s", "goodput, requests/s"]
    return Table(["variant", "load", *headings, *rates], lines)


def _sources(loads: Sequence[Json]) -> Iterator[Block]:
    """What was sent, once for loads that sent the same."""
    told: list[tuple[object, ...]] = []
    for served in loads:
        load, check = served["load"], served["check"]
        same = tuple(v for k, v in load.items() if k not in ("arrivals", "concurrency", "rate"))
        if same in told:
            continue
        told.append(same)
        yield Sentence([
            *number(load["requests"], "d"), Piece(" requests, prompts of "),
            *_lengths(load, "prompt"), Piece(" tokens, of them shared: "),
            *number(load["shared_prefix"], "d"), Piece("; answers of "), *_lengths(load, "output"),
            Piece(f"; from {load['source']}; seed "), *number(load["seed"], "d"),
            Piece("; repeats: "), *number(served["repeats"], "d"),
            Piece("; tokens checked: "), *number(check["tokens"], "d"),
        ])  # fmt: skip


def _ratios(ratios: Sequence[Json]) -> Table:
    lines = [
        [
            [Piece(f"{r['variant']} over {r['against']}")], _load(r["load"]),
            _spread(r["output_tokens_per_second"], ".2f"), _spread(r["ttft"], ".2f"),
            _spread(r["tpot"], ".2f"),
        ]
        for r in ratios
    ]  # fmt: skip
    return Table(["in the same round", "load", "output tokens/s", "TTFT", "TPOT"], lines)


def _sweep(cells: Sequence[Json]) -> Table:
    lines = [
        [
            [Piece(c["variant"])], number(c["batch"], "d"), number(c["context"], "d"),
            _spread(c["prefill"], ".0f"), _spread(c["decode"], ".1f"),
        ]
        for c in cells
    ]  # fmt: skip
    return Table(["variant", "batch", "context", "prefill, tokens/s", "decode, tokens/s"], lines)


def _memory(memory: Json) -> Table:
    keys = ("weights", "kv", "kv_touched", "activations", "process")
    lines = [
        [[Piece(variant)], *(number(split[key], ".1f", MB) for key in keys)]
        for variant, split in memory.items()
    ]
    headings = ["weights, MB", "KV, MB", "of it in use", "activations, MB", "whole process, MB"]
    return Table(["variant", *headings], lines)


def _roofline(roofline: Json) -> Iterator[Block]:
    top = roofline["ceilings"]
    yield Sentence([
        Piece("This device, measured: "), *number(top["bandwidth"], ".1f", 1e-9),
        Piece(" GB/s, "), *number(top["matmul"], ".1f", 1e-9),
        Piece(f" billion operations/s in {top['dtype']}. Weights are "),
        *number(roofline["weight_bytes"], ".1f", MB), Piece(" MB, one token's keys and values "),
        *number(roofline["kv_bytes_per_token"], ".0f"), Piece(" bytes."),
    ])  # fmt: skip
    lines = [
        [
            [Piece(p["phase"])], number(p["batch"], "d"), number(p["context"], "d"),
            number(p["seconds"], ".2f", MS), number(p["memory"], ".2f", MS),
            number(p["compute"], ".2f", MS), [Piece(p["bound"])], number(p["share"], ".1%"),
            number(p["weight_bytes_per_token"], ".3f", MB),
            number(p["kv_bytes_per_token"], ".3f", MB),
        ]
        for p in roofline["phases"]
    ]  # fmt: skip
    headings = ["batch", "context", "measured, ms", "its bytes take", "its operations take"]
    per_token = ["weights read, MB/token", "KV read, MB/token"]
    yield Table(["phase", *headings, "bound by", "of the roofline", *per_token], lines)
