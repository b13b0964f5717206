"""Tokens a second of serving, ours beside other engines', by turns on one machine.

    python -m lowbit.evals.serving_bench ENGINE=MODEL[,OPTION][@PYTHON] ... [--threads 2]

    python -m lowbit.evals.serving_bench lowbit=OUR-W8A8 lowbit=OUR-W4A16 transformers=MODEL \\
        vllm=W8A8,compiled@/envs/vllm/bin/python llama=MODEL-Q4_0.gguf

Each engine (serving_engines.py) is a process of its own, by the interpreter named behind @ (this
one where none is), and loads once; the loads then go round all engines, as many times as --repeats
says, one engine at a time, the others stopped. Loads, of random tokens, greedy and without an end:

  batch    16 prompts of 128 tokens, 128 new ones each; new tokens over all seconds
  prefill  a prompt of 512 tokens and one new one; the prompt's tokens over the seconds
  single   a prompt of 16 tokens: 127 tokens over the seconds of 128 new ones less those of one

The table gives the median, the slowest and the fastest, and the median over the first engine's.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels.errors import UserError
from .report import cpu_name
from .serving_engines import ENGINES

SCRIPT = Path(__file__).with_name("serving_engines.py")
VOCABULARY = 30000  # token ids below this are in every vocabulary of the models meant here


class Load(NamedTuple):
    """prompts of so many tokens, new ones for each; counted: tokens that a second is said of;
    less_one: whether the seconds of one new token are taken off."""

    prompts: int
    prompt_tokens: int
    new: int
    counted: int
    less_one: bool = False


LOADS = {
    "batch": Load(16, 128, 128, 16 * 128),
    "prefill": Load(1, 512, 1, 512),
    "single": Load(1, 16, 128, 127, less_one=True),
}


class Asked(NamedTuple):
    """An engine as the command line names it."""

    engine: str
    model: str
    option: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Asked:
        engine, equals, rest = text.partition("=")
        if not equals or engine not in ENGINES:
            raise UserError(
                f"'{text}' must be ENGINE=MODEL[,OPTION][@PYTHON] with one of {', '.join(ENGINES)}"
            )
        rest, _, python = rest.partition("@")
        model, _, option = rest.partition(",")
        return cls(engine, model, option, python or sys.executable)


class Running:
    """An engine's process, loaded."""

    def __init__(self, asked: Asked, threads: int) -> None:
        self.asked = asked
        self._process = subprocess.Popen(
            [asked.python, str(SCRIPT), asked.engine, asked.model, str(threads), asked.option],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.name: str = self._answer()["ready"]
        self._pause()

    def seconds(self, prompts: list[list[int]], new: int) -> float | None:
        """None where the engine cannot run such a load."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        seconds = self._answer().get("seconds")
        self._pause()
        return seconds

    def _pause(self) -> None:
        """Threads of some engines spin while they have nothing to do."""
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(
                f"{self.asked.engine} on {self.asked.model} ended with exit code "
                f"{self._process.wait()}; it says why above"
            )
        return json.loads(line)


def rate(engine: Running, load: Load, draw: random.Random) -> float | None:
    """Tokens a second of one run, on prompts that no cache has seen."""

    def prompts() -> list[list[int]]:
        return [
            [draw.randrange(VOCABULARY) for _ in range(load.prompt_tokens)]
            for _ in range(load.prompts)
        ]

    seconds = engine.seconds(prompts(), load.new)
    one = engine.seconds(prompts(), 1) if load.less_one and seconds is not None else 0.0
    return None if seconds is None or one is None else load.counted / (seconds - one)


def measure(
    engines: Sequence[Running], loads: Sequence[str], repeats: int, seed: int = 0
) -> dict[tuple[int, str], list[float]]:
    """Rates of each engine (by its number) and load, after one run of each that is not counted."""
    rates: dict[tuple[int, str], list[float]] = {}
    for turn in range(repeats + 1):
        for name in loads:
            for number, engine in enumerate(engines):
                found = rate(engine, LOADS[name], random.Random(f"{seed} {turn} {name}"))
                if turn and found is not None:
                    rates.setdefault((number, name), []).append(found)
    return rates


def table(
    names: Sequence[str], loads: Sequence[str], rates: dict[tuple[int, str], list[float]]
) -> str:
    """Markdown: a row for each engine."""
    lines = ["| tokens/s | " + " | ".join(loads) + " |", "|---" * (len(loads) + 1) + "|"]
    for number, name in enumerate(names):
        cells = []
        for load in loads:
            own, first = rates.get((number, load)), rates.get((0, load))
            if own is None:
                cells.append("-")
                continue
            middle = statistics.median(own)
            times = "" if first is None else f", {middle / statistics.median(first):.2f}x"
            cells.append(f"{middle:.0f} ({min(own):.0f}-{max(own):.0f}){times}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    described = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        description=described[0], epilog="\n\n".join(described[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("engines", nargs="+", metavar="ENGINE=MODEL[,OPTION][@PYTHON]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    args = parser.parse_args()
    running: list[Running] = []
    try:
        for asked in [Asked.parse(text) for text in args.engines]:
            running.append(Running(asked, args.threads))
        rates = measure(running, args.loads, args.repeats)
    except UserError as e:
        parser.exit(1, f"{e}\n")
    finally:
        for engine in running:
            engine.close()
    names = [f"{engine.name}: {Path(engine.asked.model).name}" for engine in running]
    said = f"{args.threads} threads of {cpu_name()}, median (slowest-fastest) of {args.repeats}"
    sys.stdout.write(f"{table(names, args.loads, rates)}\n\n{said}\n")


if __name__ == "__main__":
    main()
