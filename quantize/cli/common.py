"""What the subcommands share: notes on standard error, one JSON object on standard output."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import typer


def say(line: str) -> None:
    """A line for the user, on standard error: standard output belongs to results."""
    typer.echo(line, err=True)


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def write_json(path: Path, value: Any) -> None:
    """One JSON object as a file."""
    path.write_text(json.dumps(value, indent=2, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
