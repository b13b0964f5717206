"""What a comparison will give and take, before it is begun.

Sizes of checkpoints and their making are those of `quantize plan`; of GGUF files the size is
counted from the plan of their tensors, their making is not timed. The time of measuring is that of
one window through the original model, measured here, times all windows of all models. Each making,
and each timing of speed, is a process of its own, whose start is measured, too.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..calib.text import load_text, load_tokenizer
from ..kernels.device import resolve_device
from ..kernels.errors import UserError
from ..quantize.checkpoint.load import Checkpoint
from ..quantize.gguf.export import plan as gguf_plan
from ..quantize.gguf.export import read_hyperparameters
from ..quantize.gguf.type_plan import wish
from ..quantize.planning.make import plan
from .comparison import Candidate, CompareSettings
from .measure import text_ids
from .perplexity import log_probabilities
from .scorer import load_scorer
from .windows import Window, Windowing, cut_windows

START = (
    "import sys; from pathlib import Path; from lowbit.calib import layer_loop;"
    "[file.read_bytes() for file in Path(sys.argv[1]).glob('*.safetensors')]"
)


class CandidateEstimate(NamedTuple):
    """tensor_bytes and bits per weight of what would be made; seconds of making it and the peak
    memory in bytes, None where they are not known; note: why not."""

    key: str
    tensor_bytes: int | None
    bits_per_weight: float | None
    seconds: float | None
    peak_memory: int | None
    note: str = ""


class Estimate(NamedTuple):
    """windows: of the evaluation text. seconds_a_window: of the original model. measuring: seconds
    of all windows through all models, the original once for each batch of candidates. starting:
    seconds in which all processes start and load the model. refused: why the others cannot be
    made, by key."""

    candidates: list[CandidateEstimate]
    windows: int
    seconds_a_window: float | None
    measuring: float | None
    starting: float | None
    refused: dict[str, str]

    @property
    def seconds(self) -> float | None:
        """Of everything whose time is known; None where nothing was timed."""
        known = [c.seconds for c in self.candidates if c.seconds is not None]
        if self.measuring is None:
            return None
        return sum(known) + self.measuring + (self.starting or 0.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "candidates": [c._asdict() for c in self.candidates],
            "seconds": self.seconds,
        }


def estimate(
    model: Path,
    candidates: Sequence[Candidate],
    settings: CompareSettings,
    windowing: Windowing,
    timed: bool = True,
) -> Estimate:
    """The estimate for the model folder. UserError where none can be made, or none measured."""
    found, refused = _foreseen(model, candidates, settings, timed)
    tokenizer = load_tokenizer(model)
    text = load_text(settings.text, "evaluation", tokenizer).text
    windows = cut_windows(text_ids(text, tokenizer, windowing), windowing, tokenizer.bos_token_id)
    if not timed:
        return Estimate(found, len(windows), None, None, None, refused)
    one = _seconds_of(model, windows[0], settings)
    made = [c for c in candidates if c.key not in refused]
    passes = len(made) + -(-len(made) // settings.together)
    timings = 1 + sum(c.gguf is None for c in made) if settings.speed else 0
    starting = start_seconds(model) * (len(made) + timings)
    return Estimate(found, len(windows), one, one * len(windows) * passes, starting, refused)


def start_seconds(model: Path) -> float:
    """Of a process that imports what a run does and reads every page of the model's files."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", START, str(model)], check=True, capture_output=True)
    return time.perf_counter() - start


def _foreseen(
    model: Path, candidates: Sequence[Candidate], settings: CompareSettings, timed: bool
) -> tuple[list[CandidateEstimate], dict[str, str]]:
    """Of those that the model can have, and why it cannot have the others, by key."""
    found: list[CandidateEstimate] = []
    refused: dict[str, str] = {}
    for candidate in candidates:
        try:
            found.append(_of(model, candidate, settings, timed))
        except UserError as e:
            refused[candidate.key] = str(e)
    if not found:
        key, why = next(iter(refused.items()))
        raise UserError(f"nothing that was named can be made, first {key}: {why}")
    return found, refused


def _of(
    model: Path, candidate: Candidate, settings: CompareSettings, timed: bool
) -> CandidateEstimate:
    if candidate.recipe is None:
        return _of_gguf(model, candidate)
    foresight = plan(model, candidate.recipe, device=settings.device, timed=timed).foresight
    seconds = None if foresight.time is None else foresight.time.seconds
    sizes = foresight.totals
    return CandidateEstimate(
        candidate.key, sizes.tensor_bytes, sizes.bits_per_weight, seconds, foresight.memory.host
    )


def _of_gguf(model: Path, candidate: Candidate) -> CandidateEstimate:
    assert candidate.gguf is not None, candidate
    wanted = wish(candidate.gguf)
    checkpoint = Checkpoint(model)
    try:
        entries = gguf_plan(checkpoint, read_hyperparameters(checkpoint), wanted)
    except UserError as e:
        if candidate.method == "round":
            raise
        return CandidateEstimate(candidate.key, None, None, None, None, str(e))
    finally:
        checkpoint.shards.close()
    nbytes = sum(e.planned.nbytes for e in entries)
    bits = 8 * nbytes / sum(e.planned.weights for e in entries)
    return CandidateEstimate(candidate.key, nbytes, bits, None, None, "its making is not timed")


def _seconds_of(model: Path, window: Window, settings: CompareSettings) -> float:
    """Of one window through the original; it runs twice, the first time to warm up."""
    scorer = load_scorer(model, settings.dtype, resolve_device(settings.device))
    log_probabilities(scorer, window)
    start = time.perf_counter()
    log_probabilities(scorer, window)
    return time.perf_counter() - start
