"""How commands end that are cut short: by Ctrl-C while they start, by a reader that has gone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .command import ENVIRONMENT, Commands, in_new_interpreter
from .test_cli_help import installed

# Ctrl-C as soon as a module is looked for; it may be ignored in a background job
STRIKE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Striking:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Striking)
"""


@pytest.mark.parametrize("module", ["typer", "lowbit.quantize.cli.run", "lowbit.kernels.errors"])
def test_an_interrupt_while_modules_load_is_quiet(module: str) -> None:
    outcome = in_new_interpreter("--help", before=STRIKE.format(module=module))
    assert (outcome.code, outcome.stderr) == (130, "quantize: interrupted\n")


@pytest.mark.parametrize(
    "args", [["inspect"], ["inspect", "--json"], ["inspect", "--all"], ["verify"]], ids=" ".join
)
def test_a_pipe_that_nobody_reads_ends_the_command_quietly(args: list[str], packed: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [installed(), args[0], str(packed), *args[1:]],
        stdout=writer, stderr=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_version_is_told(command: Commands) -> None:
    told = command("--version")
    assert told.code == 0 and told.stdout.startswith("lowbit 0.")
