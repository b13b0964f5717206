"""Help is quick, loads nothing heavy, and shows an example of every command."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from lowbit.quantize.cli.app import app

from .command import ENVIRONMENT

SECONDS = 0.3  # CPU time of `quantize --help`
SHARE = 2.2  # of a bare typer app's own help, where the machine is too slow for that
BARE = """
import typer
app = typer.Typer(add_completion=False)
def bare(x: str = typer.Option("a", help="Some words.")) -> None: ...
for i in range(12):
    app.command(f"c{i}")(bare)
app(["--help"])
"""
HEAVY = {"torch", "transformers", "numpy", "datasets", "huggingface_hub", "gguf", "safetensors"}
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def installed() -> str:
    """The `quantize` script of the environment that the tests run in."""
    script = shutil.which("quantize", path=str(Path(sys.executable).parent))
    assert script is not None, "the package is not installed: pip install -e '.[test]'"
    return script


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_help_takes_little_time() -> None:
    own, bare = (installed(), "--help"), (sys.executable, "-c", BARE)
    cpu_seconds(*own)  # compiles modules once
    times = [(cpu_seconds(*own), cpu_seconds(*bare)) for _ in range(5)]
    fastest, of_bare = (min(x) for x in zip(*times, strict=True))
    assert fastest < max(SECONDS, SHARE * of_bare), (fastest, of_bare)


def imported_by(*commands: list[str]) -> tuple[set[str], list[str]]:
    """Top-level modules that these command lines load, and what each prints."""
    code = """
import contextlib, io, json, sys
from lowbit.quantize.cli import main
printed = []
for args in json.loads(sys.argv[1]):
    sys.argv = ["quantize", *args]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    printed.append(out.getvalue())
print(json.dumps([sorted({name.partition(".")[0] for name in sys.modules}), printed]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    modules, printed = json.loads(done.stdout)
    return set(modules), printed


def test_help_and_recipes_load_nothing_heavy() -> None:
    lines = [["--help"], *([name, "--help"] for name in COMMANDS)]
    lines += [["run", "MODEL", "-o", "OUT", "--dump-recipe"]]
    modules, printed = imported_by(*lines)
    assert not modules & HEAVY
    assert all(name in printed[0] for name in COMMANDS)
    assert "scheme: W4A16" in printed[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert f"Example: quantize {name}" in command.help
    assert all(p.help for p in command.params), [p.name for p in command.params if not p.help]


def test_no_arguments_show_the_help() -> None:
    done = subprocess.run([installed()], capture_output=True, text=True)
    assert "inspect" in done.stdout + done.stderr
    assert done.returncode in (0, 2)  # click's answer to a missing command has changed before
