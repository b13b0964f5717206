"""The figures of serving: latencies against the load, and what memory is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .report_serving import load_curves, load_size
from .report_style import COLOURS
from .summary import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = {"p50": ("-", 1.0), "p99": (":", 0.8)}  # line and opacity
PARTS = {"weights": "weights", "kv": "KV", "activations": "activations"}
UNITS = {"closed": "clients", "poisson": "requests/s"}


def draw_latency(axes: list[Axes], group: Json) -> None:
    """TTFT above, TPOT below; a line for each variant, by clients or by requests a second."""
    number, units = 0, set[str]()
    for row in group["rows"]:
        for (variant, arrivals), served in load_curves(row.get("bench") or {"loads": []}).items():
            if len(served) < 2:
                continue
            colour, label = COLOURS[number % len(COLOURS)], f"{row['label']}, {variant}"
            number += 1
            units.add(UNITS[arrivals])
            for ax, kind in zip(axes, ("ttft", "tpot"), strict=True):
                _curve(ax, served, kind, colour, label)
    for ax, words in zip(axes, ("first token, ms", "each token after it, ms"), strict=True):
        ax.set_ylabel(words)
        ax.set_ylim(bottom=0)
        ax.grid(True)
    axes[0].legend(fontsize=9)
    axes[-1].set_xlabel(" or ".join(sorted(units)))


def _curve(ax: Axes, served: list[Json], kind: str, colour: str, label: str) -> None:
    known = [s for s in served if s[kind] is not None]
    sizes = [load_size(s) for s in known]
    for share, (line, alpha) in SHOWN.items():
        heights = [1e3 * s[kind][share]["median"] for s in known]
        ax.plot(
            sizes, heights, line, color=colour, alpha=alpha, marker="o", markersize=3,
            label=f"{label}, {share}",
        )  # fmt: skip


def draw_memory(axes: list[Axes], group: Json) -> None:
    """A bar for each variant: weights, all blocks of keys and values, activations."""
    ax, names = axes[0], list[str]()
    splits = list[Json]()
    for row in group["rows"]:
        for variant, split in (row.get("bench") or {"memory": {}})["memory"].items():
            names.append(f"{row['label']}, {variant}")
            splits.append(split)
    ends = [0.0] * len(splits)
    for (key, words), colour in zip(PARTS.items(), COLOURS, strict=False):
        widths = [(split[key] or 0) / 1e6 for split in splits]
        ax.barh(names, widths, left=ends, label=words, color=colour, height=0.6)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    ax.invert_yaxis()
    ax.set_xlabel("MB")
    ax.grid(True, axis="x")
    ax.legend(fontsize=9)
