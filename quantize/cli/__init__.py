"""The `quantize` command: a module for each subcommand, with slow imports inside."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from ...kernels.errors import UserError
from ..checkpoint.files import explained
from .convert import convert
from .demo import demo
from .eval import evaluate
from .export import export
from .generate import generate
from .imatrix import imatrix
from .inspect import inspect
from .plan import plan
from .run import run
from .verify import verify


class _Interrupted(Exception):
    """Ctrl-C, carried past typer's own handling."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as e:
            raise _Interrupted from e


app = typer.Typer(
    name="quantize",
    cls=_Commands,
    help="Quantize Hugging Face language models, run them, measure what it cost, export to GGUF.",
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
app.command("eval")(evaluate)
app.command()(convert)
app.command()(imatrix)
app.command()(export)


def main() -> None:
    """Run the command line. Exit codes: 2 for input that cannot be used, 130 for Ctrl-C, 1 for a
    fault of lowbit's own, which alone shows a traceback."""
    try:
        app(prog_name="quantize")
    except UserError as e:
        _fail(str(e), 2)
    except _Interrupted:
        _fail("interrupted", 130)
    except OSError as e:
        said = explained(e)
        _fault() if said is None else _fail(said, 2)
    except Exception:
        _fault()


def _fault() -> None:
    traceback.print_exc()
    _fail("this is a fault of lowbit, not of your input: please report it with the lines above", 1)


def _fail(message: str, code: int) -> None:
    typer.echo(f"quantize: {message}", err=True)
    sys.exit(code)
