"""`quantize report`: results files as one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...kernels.errors import UserError, counted
from .common import check_apart, say

ENDINGS = (".html", ".md", ".json")


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Results: eval --report FILE.json, run --json, a demo's report.json."),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The file to write: .html, .md or .json.")
    ] = Path("report.html"),
    title: Annotated[
        str, typer.Option(help="The heading of the page.")
    ] = "What quantization cost and gained",
    history: Annotated[
        bool,
        typer.Option("--history", help="The files are of one project over time: what has changed."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
) -> None:
    """Put results on one page: verdicts, table, Pareto plots, errors by layer, protocol.

    The HTML file needs no other: it is light or dark as the reader's system is, and prints. Results
    by different protocols stand apart; a run's file adds its errors to the rows of its checkpoint,
    a bench's its latencies. With --history, each model and metric over time instead, and what is
    worse than the best before it by more than the noise of both.

    Example: quantize report w4.json w8.json -o report.html
    """
    from ...evals.history import history as over_time
    from ...evals.results import read_results
    from ...evals.summary import summarize

    if out.suffix not in ENDINGS:
        raise UserError(f"--out takes a file that ends in {', '.join(ENDINGS)}, got {out}")
    check_apart(out, *results)
    if not out.absolute().parent.is_dir():
        raise UserError(f"no such folder for the report: {out.absolute().parent}")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; give --overwrite to replace it, or another name")
    files = [(path.name, read_results(path)) for path in results]
    summary = over_time(files) if history else summarize(files)
    if out.suffix == ".json":
        text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    elif out.suffix == ".md":
        from ...evals.report_markdown import markdown

        text = markdown(summary, title)
    else:
        from ...evals.report_page import html

        text = html(summary, title)
    out.write_text(text, encoding="utf-8")
    shown = sum(len(group["series" if history else "rows"]) for group in summary["groups"])
    what = counted(shown, "series", "series") if history else counted(shown, "model")
    say(f"wrote {out}: {what} from {counted(len(results), 'file')}")
