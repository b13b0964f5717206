"""What `quantize eval` and `quantize bench` share: a server's address, and the file to write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...kernels.errors import UserError
from .common import check_apart

ServedName = Annotated[
    str | None, typer.Option(help="The model's name there. [default: the first it has]")
]
ApiKey = Annotated[str | None, typer.Option(help="Of the server.", envvar="OPENAI_API_KEY")]


def check_report(report: Path, endings: tuple[str, ...], *inputs: str | Path | None) -> None:
    """UserError where `report` cannot be written: another ending than one of `endings`, no such
    folder, or a place that is one of the inputs."""
    if report.suffix not in endings:
        kinds = " or ".join(f"FILE{ending}" for ending in endings)
        raise UserError(f"--report takes {kinds}, got {report}")
    if not report.absolute().parent.is_dir():
        raise UserError(f"no such folder for the report: {report.absolute().parent}")
    if report.is_dir():
        raise UserError(f"--report {report} is a folder; name a file in it")
    check_apart(report, *(given for given in inputs if given is not None))
