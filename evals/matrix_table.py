"""The accuracy matrix as a table: each result beside its peers' and the bar that it has to pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .matrix_rows import PEER_ROWS, Bar, MatrixRow

HEADINGS = (
    "scheme", "method", "perplexity", "KLD", "KLD in llama.cpp", "top-1", "bits/weight", "file, MB",
    "wall, s", "CPU, s", "peak, MB", "best peer, KLD", "ratio", "bar",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One row on one model, as it is kept in its JSON file. tool: a peer's name, None for lowbit.

    perplexity, kld (mean, nats) and its standard error, top1: by the protocol of the matrix. bits:
    per quantized weight, of a GGUF file per weight. nbytes: of the files of weights. seconds,
    cpu_seconds, peak_memory (bytes): of the whole command; None where nothing was run. llama_kld:
    what llama-perplexity has measured. error: why there are no numbers.
    """

    key: str
    family: str
    method: str
    tool: str | None = None
    perplexity: float | None = None
    original_perplexity: float | None = None
    kld: float | None = None
    kld_stderr: float | None = None
    top1: float | None = None
    bits: float | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_memory: int | None = None
    nbytes: int | None = None
    llama_kld: float | None = None
    error: str | None = None

    @property
    def divergence(self) -> float | None:
        """What the row is judged by: llama-perplexity's number where there is one."""
        return self.kld if self.llama_kld is None else self.llama_kld


class Verdict(NamedTuple):
    """A number over its reference, and whether it keeps to the bar; None: there is no reference."""

    ratio: float
    limit: float
    of: str

    @property
    def passed(self) -> bool:
        return self.ratio <= self.limit


class BestPeer(NamedTuple):
    """The peer with the lowest KL divergence of a family. recorded: not measured in this run."""

    tool: str
    kld: float
    recorded: bool


def best_peer(family: str, model: str, results: Mapping[str, Result]) -> BestPeer | None:
    """Measured peers where there are any; else what was recorded for a model of this name."""
    measured = [
        BestPeer(r.tool, r.divergence, False)
        for r in results.values()
        if r.tool is not None and r.family == family and r.divergence is not None
    ]
    recorded = [
        BestPeer(row.tool, row.recorded[model], True)
        for row in PEER_ROWS
        if row.family == family and model in row.recorded
    ]
    return min(measured or recorded, key=lambda peer: peer.kld, default=None)


def verdict(
    bar: Bar | None, result: Result, model: str, results: Mapping[str, Result]
) -> Verdict | None:
    """How the result stands against the bar; None without a bar, a number or a reference."""
    if bar is None or result.divergence is None or result.perplexity is None:
        return None
    value, reference = result.divergence, None
    if bar.of == "peers":
        peer = best_peer(result.family, model, results)
        reference = None if peer is None else peer.kld
    elif bar.of == "nats":
        reference = 1.0
    elif bar.of == "original perplexity":
        value, reference = result.perplexity, result.original_perplexity
    elif bar.of in results:
        reference = results[bar.of].divergence
    return None if not reference else Verdict(value / reference, bar.limit, bar.of)


def table(rows: Sequence[MatrixRow], model: str, results: Mapping[str, Result]) -> list[list[str]]:
    """The cells of HEADINGS, a line for each result: by family, peers after lowbit's rows."""
    bars = {row.key: row.bar for row in rows}
    families = list(dict.fromkeys([row.family for row in rows]))
    ordered = [
        result
        for family in families
        for result in [
            *(results[row.key] for row in rows if row.family == family and row.key in results),
            *(r for r in results.values() if r.tool is not None and r.family == family),
        ]
    ]
    return [_cells(result, bars.get(result.key), model, results) for result in ordered]


def shown(lines: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the columns that are not empty."""
    kept = [i for i in range(len(HEADINGS)) if any(line[i] for line in lines)]
    return [HEADINGS[i] for i in kept], [[line[i] for i in kept] for line in lines]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """The lines, cells of HEADINGS, as a Markdown table; empty columns are left out."""
    headings, cells = shown(lines)
    rows = [headings, ["---"] * len(headings), *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def rich_table(title: str, lines: Sequence[Sequence[str]]) -> Any:
    """The same as a table for the terminal."""
    from rich.table import Table

    headings, cells = shown(lines)
    made = Table(title=title)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in ("scheme", "method") else "right")
    for line, row in zip(lines, cells, strict=True):
        missed = "missed" in line[-1]
        made.add_row(*row, style="red" if missed else None)
    return made


def _cells(result: Result, bar: Bar | None, model: str, results: Mapping[str, Result]) -> list[str]:
    method = result.method if result.tool is None else f"{result.method} ({result.tool})"
    if result.error is not None:
        return [result.family, method, "failed", *[""] * (len(HEADINGS) - 3)]
    peer = best_peer(result.family, model, results) if result.tool is None else None
    kld = _number(result.kld, ".5f")
    return [
        result.family,
        method,
        _number(result.perplexity, ".3f"),
        kld if result.kld_stderr is None else f"{kld} ± {result.kld_stderr:.5f}",
        _number(result.llama_kld, ".5f"),
        _number(result.top1, ".2%"),
        _number(result.bits, ".3f"),
        "" if result.nbytes is None else f"{result.nbytes / 1e6:.1f}",
        _number(result.seconds, ".0f"),
        _number(result.cpu_seconds, ".0f"),
        "" if result.peak_memory is None else f"{result.peak_memory / 1e6:.0f}",
        "" if peer is None else f"{peer.tool} {peer.kld:.4f}{'*' if peer.recorded else ''}",
        "" if peer is None or result.divergence is None else f"{result.divergence / peer.kld:.2f}",
        _bar_cell(bar, verdict(bar, result, model, results)),
    ]


def _bar_cell(bar: Bar | None, found: Verdict | None) -> str:
    if bar is None:
        return ""
    limit = f"{bar.limit:g}" if bar.of == "nats" else f"{bar.limit:g} of {bar.of}"
    if found is None:
        return f"{limit}: open"
    sign, state = ("<=", "passed") if found.passed else (">", "missed")
    return f"{found.ratio:.3g} {sign} {limit}: {state}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
