"""The figures of a report as SVG that can stand inside a page.

Drawn by matplotlib without a display. Ink and grid take the page's own text colour, so that one
drawing serves light and dark and paper; the series' colours are legible on both. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .kld_bins import KLD_EDGES
from .report_history import draw_history
from .report_serving_plots import draw_latency, draw_memory
from .report_style import COLOURS
from .results import require_extra
from .summary import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"  # stands for the page's text colour
MARKERS = "osD^vPX*"
INCHES = (5.4, 3.4)
SETTINGS: dict[Any, Any] = {  # by matplotlib's names
    "svg.fonttype": "none", "svg.hashsalt": "lowbit", "font.family": "sans-serif", "font.size": 11,
    "text.parse_math": False, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK, "grid.color": INK, "grid.alpha": 0.15, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
LEVELS = {
    "50%": "kld_median", "90%": "kld_p90", "95%": "kld_p95", "99%": "kld_p99",
    "99.9%": "kld_p999", "max": "kld_max",
}  # fmt: skip
LONGEST = 28  # characters of a label, which take room from the axes
LOWEST = 1e-9  # nats that a logarithmic axis shows


def figure_svg(kind: str, group: Json, prefix: str) -> str:
    """The plot `kind` of a summary's group as one <svg> element; `prefix`: of the ids in it.

    UserError where matplotlib is not installed.
    """
    require_extra()
    import matplotlib
    from matplotlib.figure import Figure

    draw, panels = PLOTS[kind]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(INCHES[0], INCHES[1] * panels), layout="constrained")
        axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
        draw(list(axes), group)
        written = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return inline(written.getvalue(), prefix)


def inline(svg: str, prefix: str) -> str:
    """An SVG file's text as an element of a page: no prologue, no fixed size, no sheet of its own,
    ids that no other figure has, and INK as the page's text colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style\b.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    return svg.replace(INK, "currentColor").replace("<svg", '<svg role="img"', 1).strip()


def _compared(group: Json) -> list[Json]:
    return [row for row in group["rows"] if row.get("divergence")]


def _style(group: Json, row: Json) -> dict[str, Any]:
    """A row has the same colour and marker in all figures of its group."""
    i = [r["label"] for r in group["rows"] if not r["is_base"]].index(row["label"])
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def _plain_ticks(decades: bool) -> Any:
    """Plain numbers at a logarithmic axis, where there is room: matplotlib's own are mathematical
    text, which is not parsed here. decades: these alone."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    return Plain(labelOnlyBase=decades)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_plain_ticks(True))
    axes.yaxis.set_minor_formatter(_plain_ticks(False))


def _short(label: str) -> str:
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _scatter(axes: Axes, group: Json, x_of: Callable[[Json], float], front: Sequence[str]) -> None:
    """Every compared row by cost and divergence, a line through the front, the noise floor."""
    rows = [row for row in _compared(group) if x_of(row) is not None]
    points = {}
    for row in rows:
        x, y = x_of(row), max(row["divergence"]["kld_mean"], LOWEST)
        error = row["divergence"]["kld_mean_stderr"]
        axes.errorbar(x, y, yerr=error, linestyle="none", capsize=2, **_style(group, row))
        axes.annotate(
            _short(row["label"]), (x, y), xytext=(5, 5), textcoords="offset points", fontsize=9,
            clip_on=False,
        )  # fmt: skip
        points[row["label"]] = x, y
    line = sorted(points[label] for label in front if label in points)
    if len(line) > 1:
        axes.plot(*zip(*line, strict=True), color=INK, alpha=0.4, linewidth=1, zorder=0)
    if group["noise_floor"] is not None:
        floor = max(group["noise_floor"]["kld_mean"], LOWEST)
        axes.axhline(floor, color=INK, linestyle=":", linewidth=1)
        axes.annotate(
            "noise floor", (1, floor), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize=9,
        )  # fmt: skip
    _logarithmic(axes)
    axes.locator_params(axis="x", nbins=5)
    axes.margins(x=0.18, y=0.15)
    axes.set_ylabel("KLD, nats")
    axes.grid(True)


def _size(axes: list[Axes], group: Json) -> None:
    def megabytes(row: Json) -> Any:
        return row["size"]["file_bytes"] / 1e6 if row["size"] else None

    _scatter(axes[0], group, megabytes, group["pareto"]["size"])
    axes[0].set_xlabel("weights file, MB")


def _speed(axes: list[Axes], group: Json) -> None:
    def decode(row: Json) -> Any:
        return row["speed"]["decode"] if row.get("speed") else None

    _scatter(axes[0], group, decode, group["pareto"]["speed"])
    axes[0].set_xlabel("decode, tokens/s")


def _throughput(axes: list[Axes], group: Json) -> None:
    _scatter(axes[0], group, lambda r: r["throughput"], group["pareto"]["throughput"])
    axes[0].set_xlabel("output tokens/s of serving")


def _quantiles(axes: list[Axes], group: Json) -> None:
    for row in _compared(group):
        heights = [max(row["divergence"][key], LOWEST) for key in LEVELS.values()]
        style = _style(group, row)
        axes[0].plot(list(LEVELS), heights, label=_short(row["label"]), markersize=4, **style)
    if (floor := group["noise_floor"]) is not None:
        heights = [max(floor[key], LOWEST) for key in LEVELS.values()]
        axes[0].plot(list(LEVELS), heights, color=INK, linestyle=":", label="noise floor")
    _logarithmic(axes[0])
    axes[0].set_xlabel("positions below")
    axes[0].set_ylabel("KLD, nats")
    axes[0].grid(True)
    axes[0].legend(fontsize=9)


def _histogram(axes: list[Axes], group: Json) -> None:
    """The share of positions in each bin; both ends are drawn as wide as the others."""
    step = KLD_EDGES[1] / KLD_EDGES[0]
    edges = [KLD_EDGES[0] / step, *KLD_EDGES, KLD_EDGES[-1] * step]
    drawn = [(_short(r["label"]), r["divergence"], _style(group, r)["color"])
             for r in _compared(group)]  # fmt: skip
    if (floor := group["noise_floor"]) is not None:
        drawn.append(("noise floor", floor, INK))
    for label, found, colour in drawn:
        if (counts := found.get("histogram")) is not None:
            shares = [100 * count / found["positions"] for count in counts]
            axes[0].stairs(shares, edges, color=colour, label=label, linewidth=1.5)
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_formatter(_plain_ticks(True))
    axes[0].xaxis.set_minor_formatter(_plain_ticks(False))
    axes[0].set_xlabel("KLD of a position, nats")
    axes[0].set_ylabel("% of positions")
    axes[0].grid(True)
    axes[0].legend(fontsize=9)


def _layers(axes: list[Axes], group: Json) -> None:
    rows = [row for row in group["rows"] if row["layers"]]
    for ax, key, label in zip(
        axes, ("relative_error", "bits"), ("relative output error", "bits per weight"), strict=True
    ):
        for row in rows:
            known = [(at["layer"], at[key]) for at in row["layers"] if at[key] is not None]
            if known:
                x, y = zip(*known, strict=True)
                ax.plot(x, y, label=_short(row["label"]), markersize=3, **_style(group, row))
        ax.set_ylabel(label)
        ax.grid(True)
    if any(at["relative_error"] for row in rows for at in row["layers"]):
        _logarithmic(axes[0])
    axes[-1].legend(fontsize=9)
    axes[-1].set_xlabel("decoder layer")


Draw = Callable[[list[Any], Json], None]
PLOTS: dict[str, tuple[Draw, int]] = {  # how, and in how many panels
    "size": (_size, 1),
    "speed": (_speed, 1),
    "throughput": (_throughput, 1),
    "quantiles": (_quantiles, 1),
    "histogram": (_histogram, 1),
    "layers": (_layers, 2),
    "latency": (draw_latency, 2),
    "memory": (draw_memory, 1),
    "history": (draw_history, 1),
}
