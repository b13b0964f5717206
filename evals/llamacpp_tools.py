"""llama.cpp's own command line tools, where they are installed or were built: its quantizer, and
its measure of the KL divergence between two GGUF files.

llama-perplexity writes the base model's log-probabilities to a file, in 16 bits each, and compares
other models with them: over non-overlapping windows of `ctx` tokens, at positions ctx / 2 to
ctx - 2 of each (`quantize eval --ctx CTX --skip CTX/2` counts the last position too).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from ..kernels.errors import UserError

TOOLS = ("llama-quantize", "llama-perplexity")
SHOWN = 800  # characters of a failed tool's output


class LlamaDivergence(NamedTuple):
    """What llama-perplexity says: KLD in nats, its standard error, top-1 agreement 0 .. 1, and the
    perplexity."""

    kld: float
    kld_stderr: float
    top1: float
    perplexity: float


class LlamaTools:
    """The tools in `folder`; `threads`: of each run. UserError where one is missing."""

    def __init__(self, folder: Path, threads: int) -> None:
        for tool in TOOLS:
            if not (folder / tool).is_file():
                raise UserError(
                    f"{folder} holds no {tool}; give the folder of llama.cpp's programs"
                )
        self._folder, self._threads = folder, threads

    def quantize_command(
        self, source: Path, out: Path, file_type: str, imatrix: Path | None
    ) -> list[str]:
        """The command that quantizes the GGUF file `source` to `out`."""
        weighed = [] if imatrix is None else ["--imatrix", str(imatrix)]
        return [
            str(self._folder / "llama-quantize"), *weighed, str(source), str(out), file_type,
            str(self._threads),
        ]  # fmt: skip

    def keep_base(self, base: Path, text: Path, logits: Path, ctx: int, windows: int) -> None:
        """Write to `logits` what the GGUF file `base` predicts for `text`."""
        self._perplexity(base, text, logits, ctx, windows)

    def divergence(
        self, model: Path, text: Path, logits: Path, ctx: int, windows: int
    ) -> LlamaDivergence:
        """How far the GGUF file `model` is from the model that `logits` was kept of."""
        said = self._perplexity(model, text, logits, ctx, windows, "--kl-divergence")
        return parsed(said)

    def _perplexity(
        self, model: Path, text: Path, logits: Path, ctx: int, windows: int, *options: str
    ) -> str:
        command = [
            str(self._folder / "llama-perplexity"), "-m", str(model), "-f", str(text),
            "--kl-divergence-base", str(logits), "-c", str(ctx), "--chunks", str(windows),
            "-t", str(self._threads), "-ngl", "0", *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            raise UserError(f"llama-perplexity failed on {model}: {done.stderr[-SHOWN:]}")
        return done.stdout + done.stderr


def parsed(said: str) -> LlamaDivergence:
    """The statistics in what llama-perplexity prints; UserError where they are not there."""

    def number(label: str) -> tuple[float, float]:
        found = re.search(rf"{label}\s*:\s*([\d.eE+-]+)\s*±\s*([\d.eE+-]+)", said)
        if found is None:
            raise UserError(f"llama-perplexity printed no '{label}': {said[-SHOWN:]}")
        return float(found[1]), float(found[2])

    return LlamaDivergence(
        *number("Mean +KLD"), number("Same top p")[0] / 100, number(r"Mean PPL\(Q\)")[0]
    )
