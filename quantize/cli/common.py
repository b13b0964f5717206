"""What the subcommands share: notes on standard error, one JSON object on standard output."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...kernels.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


def say(line: str) -> None:
    """A line for the user, on standard error: standard output belongs to results."""
    typer.echo(line, err=True)


def terminal(stderr: bool = False) -> Console:
    """Where tables are printed."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # BrokenPipeError, for main: rich would end the process with 1

    return Terminal(stderr=stderr)


def model_path(model: str) -> Path:
    """The folder of a model: one of that name, one for a GGUF file, or a Hub model's.

    UserError when there is none.
    """
    from ..gguf.as_folder import folder_of, is_gguf

    if is_gguf(Path(model)):
        return folder_of(Path(model), say)
    from ...calib.source import model_folder

    return model_folder(model)


def check_apart(out: Path, *inputs: str | Path) -> None:
    """UserError when writing the file `out` would replace one of the inputs or a part of it.

    inputs: files or folders; what does not exist (a Hub model's name) is no input of this machine.
    A model's folder may hold files that were made of it.
    """
    from ..gguf.reader import PART

    place = out.resolve()
    for given in map(Path, inputs):
        if not given.exists():
            continue
        read = given.resolve()
        part = PART.fullmatch(read.name)
        whole = read.with_name(f"{part[1]}.gguf") if part else read
        made = place.suffix in (".gguf", ".dat") or not place.exists()
        if place in (read, whole) or (read.is_dir() and place.is_relative_to(read) and not made):
            raise UserError(f"{out} would be written over the input {given}; give another name")


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
