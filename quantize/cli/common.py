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


def model_path(model: str) -> Path:
    """The folder of a model: one of that name, one for a GGUF file, or a Hub model's.

    UserError when there is none.
    """
    from ..gguf.as_folder import folder_of, is_gguf

    if is_gguf(Path(model)):
        return folder_of(Path(model), say)
    from ...calib.source import model_folder

    return model_folder(model)


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
