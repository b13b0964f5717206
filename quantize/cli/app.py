"""The commands of `quantize`: a module for each, with slow imports inside."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .bench import bench
from .chat import chat
from .compare import compare
from .convert import convert
from .demo import demo
from .doctor import doctor
from .eval import evaluate
from .export import export
from .generate import generate
from .imatrix import imatrix
from .inspect import inspect
from .plan import plan
from .report import report
from .run import run
from .serve import serve
from .tune import tune
from .verify import verify


class Interrupted(Exception):
    """Ctrl-C, carried past typer's own handling."""


class PipeClosed(Exception):
    """Nobody reads the output any more; carried past typer's own handling."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as e:
            raise Interrupted from e
        except BrokenPipeError as e:
            raise PipeClosed from e


app = typer.Typer(
    name="quantize",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(plan)
app.command()(run)
app.command()(inspect)
app.command()(verify)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command("eval")(evaluate)
app.command()(compare)
app.command()(bench)
app.command()(report)
app.command()(convert)
app.command()(imatrix)
app.command()(export)
app.command()(doctor)
app.command()(tune)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"lowbit {version('lowbit')}")
        raise typer.Exit


@app.callback()
def quantize(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and stop."
        ),
    ] = False,
) -> None:
    """Quantize Hugging Face language models, run them, measure what it cost, export to GGUF."""
    if not sys.stderr.isatty():  # bars are for people; transformers' ask before they are imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
