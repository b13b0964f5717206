"""What a report says of results over time: what has regressed, a figure and a table a metric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .report_pieces import Block, Cell, Figure, Heading, Piece, Sentence, Table, number
from .report_style import COLOURS
from .summary import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DAY = 10  # characters of a time that are its date
TICKS = 5  # dates that there is room for


def history_blocks(history: Json) -> Iterator[Block]:
    """All of it."""
    yield Heading(3, "Regressions beyond the noise")
    told = list(_regressions(history))
    yield from told or [Sentence([Piece("None.")], strong=True)]
    for place, group in enumerate(history["groups"]):
        yield Heading(3, group["words"])
        yield Figure("history", f"{group['words']}; crosses have regressed", place)
        lines = [
            [[Piece(series["label"])], [Piece(p["created"])], [Piece(p["version"])], _ranged(p),
             [Piece("regressed" if p["regressed"] else "")]]
            for series in group["series"]
            for p in series["points"]
        ]  # fmt: skip
        yield Table(["model", "measured", "version", group["words"], ""], lines)


def _regressions(history: Json) -> Iterator[Block]:
    """Of each series that has regressed at its end."""
    for group in history["groups"]:
        for series in group["series"]:
            *before, last = series["points"]
            if last["regressed"]:
                best = (min if group["lower"] else max)(before, key=lambda p: p["value"])
                yield Sentence([
                    Piece(f"{series['label']}: {group['words']} is "), *_ranged(last),
                    Piece(f" in {last['file']}; it was "), *_ranged(best),
                    Piece(f" in {best['file']}."),
                ], strong=True)  # fmt: skip


def _ranged(point: Json) -> Cell:
    low, high = number(point["low"], ".5g"), number(point["high"], ".5g")
    if point["low"] == point["high"]:
        return number(point["value"], ".5g")
    return [*number(point["value"], ".5g"), Piece(" ("), *low, Piece(" to "), *high, Piece(")")]


def draw_history(axes: list[Axes], group: Json) -> None:
    """Every series over the times at which any was measured; bars are the noise."""
    ax = axes[0]
    times = sorted({p["created"] for series in group["series"] for p in series["points"]})
    for place, series in enumerate(group["series"]):
        colour, points = COLOURS[place % len(COLOURS)], series["points"]
        x = [times.index(p["created"]) for p in points]
        y = [p["value"] for p in points]
        errors = [[p["value"] - p["low"] for p in points], [p["high"] - p["value"] for p in points]]
        ax.errorbar(x, y, yerr=errors, color=colour, marker="o", markersize=4, capsize=2,
                    label=series["label"])  # fmt: skip
        worse = [(a, b) for a, b, p in zip(x, y, points, strict=True) if p["regressed"]]
        if worse:
            ax.plot(*zip(*worse, strict=True), "x", color=colour, markersize=12)
    every = -(-len(times) // TICKS)
    ax.set_xticks(range(0, len(times), every), [t[:DAY] for t in times[::every]])
    ax.set_ylabel(group["words"])
    ax.grid(True)
    ax.legend(fontsize=9)
