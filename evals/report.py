"""Results with the protocol that gives them meaning, as Markdown and as JSON.

A `Report` cannot be made without its text's hash, windows, dtype, device and versions, and nothing
else here prints a number.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .divergence import ConfidenceBucket, Divergence
from .generation import Generation
from .linears import LinearResult
from .perplexity import Perplexity
from .results import header
from .size import SizeReport
from .speed import DecodeSpeed
from .tasks import TaskResult
from .windows import Windowing

PACKAGES = ("torch", "transformers", "tokenizers", "lowbit")
DEFINITIONS = (
    "perplexity: exp of the mean negative log-likelihood (nats) of every fresh token of a window "
    "but its first",
    "KLD: KL(base || model) in nats at every fresh position; log-probabilities in float32",
    "top-1: share of positions where base and model rank the same token first; top-5: share of the "
    "base's five likeliest tokens that are among the model's five",
    "RMS of probabilities: of the text's token, the model's less the base's, over scored tokens",
    "noise floor: the base against itself with weights and computation in bfloat16",
    "standard errors: windows are the unit; that of the perplexity is perplexity x that of the "
    "mean; none with one window",
    "text: joined and tokenized once, without special tokens; a partial window at the end is "
    "dropped",
    "bits per weight: all bits stored in place of the quantized linears' weights (scales, "
    "zero-points, shapes counted); whole model: of all tensors over all weights",
    "decode: one request, greedy, in a process of its own, median of the repeats (slowest-fastest)",
)


@dataclass(frozen=True)
class Protocol:
    """What was measured on what. `windows`: how many there were; `windowing` has what was asked.
    `name`: of evals/protocols.py, None where the windows were given."""

    base: str | None
    text: str
    text_sha256: str
    text_description: str
    tokenizer: str
    windowing: Windowing
    windows: int
    scored_tokens: int
    positions: int
    dtype: str
    seed: int | None = None  # nothing that is measured here is drawn at random
    name: str | None = None


@dataclass(frozen=True)
class Environment:
    """The machine and the versions."""

    device: str
    cpu: str
    threads: int
    system: str
    python: str
    packages: dict[str, str]


class Row(NamedTuple):
    """One model's results; None: not measured. `linears`: of a checkpoint that lowbit has made."""

    name: str
    path: str
    perplexity: Perplexity
    divergence: Divergence | None
    size: SizeReport
    speed: DecodeSpeed | None
    kv: str | None = None  # how the KV cache is quantized
    linears: list[LinearResult] | None = None
    tasks: list[TaskResult] | None = None
    inputs: str | None = None  # whose rounding of what matrices read was imitated
    generation: Generation | None = None


@dataclass(frozen=True)
class Report:
    """Rows that share one protocol; the base, where there is one, comes first. `noise_floor`: the
    base's divergence from itself in bfloat16, None where it was not asked for."""

    protocol: Protocol
    environment: Environment
    rows: list[Row]
    seconds: float
    noise_floor: Divergence | None = None

    def to_dict(self, command: str = "eval") -> dict[str, Any]:
        """A results file (evals/results.py) of `quantize COMMAND`."""
        return {**header(command), **plain(self), "definitions": list(DEFINITIONS)}

    def to_json(self) -> str:
        """One JSON object, with a final newline."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """A table, then everything that its numbers depend on."""
        columns = [(title, [cell(r) for r in self.rows]) for title, cell in COLUMNS]
        shown = [(title, cells) for title, cells in columns if any(cells)]
        lines = [_line([title for title, _ in shown]), _line(["---"] * len(shown))]
        lines += [_line([cells[i] or "-" for _, cells in shown]) for i in range(len(self.rows))]
        return "\n".join([*lines, "", *self._protocol_lines(), ""])

    def _protocol_lines(self) -> list[str]:
        p, w, e = self.protocol, self.protocol.windowing, self.environment
        packages = ", ".join(f"{name} {v}" for name, v in e.packages.items())
        lines = [
            f"text: {p.text_description}; sha256 {p.text_sha256}",
            f"windows: {p.windows} of ctx {w.ctx}, stride {w.stride}, skip {w.skip}, BOS {w.bos}; "
            f"{p.scored_tokens} tokens scored, {p.positions} positions{_rules(p)}",
            f"dtype {p.dtype}, device {e.device}, {e.threads} threads, {e.cpu}, {e.system}",
            f"versions: python {e.python}, {packages}",
            f"tokenizer: {p.tokenizer}; seed: {p.seed if p.seed is not None else 'none drawn'}",
            *(f"{r.name}: {r.path}{' (base)' if r.name == p.base else ''}" for r in self.rows),
            *(
                f"{r.name}, speed: prompt {s.prompt_tokens}, {s.new_tokens} new tokens, "
                f"{s.repeats} repeats, {s.dtype}{_kernels(s)}; prefill {s.prefill:.1f} tokens/s"
                for r in self.rows
                if (s := r.speed) is not None
            ),
            *(
                f"{r.name}, by how sure the base is: {_confidence(r.divergence.confidence)}"
                for r in self.rows
                if r.divergence is not None
            ),
            *(f"{r.name}, {_task(t)}" for r in self.rows for t in r.tasks or []),
            *(f"{r.name}, {_generation(g)}" for r in self.rows if (g := r.generation) is not None),
            *([] if self.noise_floor is None else [_floor(self.noise_floor)]),
            *DEFINITIONS,
        ]
        return [f"- {line}" for line in lines]


def environment(device: torch.device) -> Environment:
    """The machine and the versions that run now."""
    return Environment(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        system=platform.platform(),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
    )


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def plain(value: Any) -> Any:
    """Dataclasses and named tuples as dictionaries, down to what JSON holds."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return {k: plain(v) for k, v in value._asdict().items()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if value == math.inf else value  # JSON has no infinity


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"


def _rules(p: Protocol) -> str:
    """The protocol's name and the rules that are not the usual ones."""
    w = p.windowing
    rules = {
        "the next token alone": w.predictive, "a shorter window at the end": w.tail,
        "the tokenizer's special tokens before the text": w.special,
    }  # fmt: skip
    told = [] if p.name is None else [f"protocol {p.name}"]
    return "".join(f"; {rule}" for rule in [*told, *(r for r, holds in rules.items() if holds)])


def _confidence(found: tuple[ConfidenceBucket, ...]) -> str:
    return ", ".join(
        f"{b.low:.0%}-{b.high:.0%} {b.positions} positions"
        + ("" if b.kld_mean is None else f" KLD {b.kld_mean:.4f} top-1 {b.top1:.1%}")
        for b in found
    )


def _task(t: TaskResult) -> str:
    right = _with_error(t.accuracy, t.accuracy_stderr, ".2%")
    norm = _with_error(t.accuracy_norm, t.accuracy_norm_stderr, ".2%")
    told = f"task {t.task}, {t.questions} questions: {right}, by length {norm}"
    if (p := t.paired) is None:
        return told
    return (
        f"{told}; right alone: base {p.only_base}, model {p.only_model}, McNemar p {p.p_value:.3f}"
    )


def _generation(g: Generation) -> str:
    told = (
        f"generation, {g.prompts} prompts, up to {g.new_tokens} tokens: runs of four repeated "
        f"{g.repetition:.1%}, loops {g.loops}"
    )
    if g.same is None:
        return told
    place = g.first_difference
    first = "" if place is None else f", the first other token at {place:g} (median)"
    return f"{told}, as the base {g.same}{first}"


def _floor(d: Divergence) -> str:
    return (
        f"noise floor: KLD {_with_error(d.kld_mean, d.kld_mean_stderr, '.6f')}, 99.9% "
        f"{d.kld_p999:.5f}, max {d.kld_max:.4f}, top-1 {d.top1:.2%}, RMS of probabilities "
        f"{d.probability_rms:.3%}"
    )


def _with_error(value: float, error: float | None, form: str) -> str:
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")


def _of_divergence(cell: Callable[[Divergence], str]) -> Callable[[Row], str]:
    return lambda row: "" if row.divergence is None else cell(row.divergence)


def _of_speed(cell: Callable[[DecodeSpeed], str]) -> Callable[[Row], str]:
    return lambda row: "" if row.speed is None else cell(row.speed)


def _bits(size: SizeReport) -> str:
    bits = (size.quantized_bits_per_weight, size.bits_per_weight)
    return " / ".join("-" if b is None else f"{b:.2f}" for b in bits) if any(bits) else ""


def _kernels(speed: DecodeSpeed) -> str:
    return "".join(f", {n} linears on {kernel}" for kernel, n in speed.kernels.items())


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("model", lambda r: r.name),
    (
        "perplexity",
        lambda r: _with_error(r.perplexity.perplexity, r.perplexity.perplexity_stderr, ".3f"),
    ),
    ("KLD mean", _of_divergence(lambda d: _with_error(d.kld_mean, d.kld_mean_stderr, ".5f"))),
    ("median", _of_divergence(lambda d: f"{d.kld_median:.5f}")),
    ("90%", _of_divergence(lambda d: f"{d.kld_p90:.4f}")),
    ("99%", _of_divergence(lambda d: f"{d.kld_p99:.4f}")),
    ("99.9%", _of_divergence(lambda d: f"{d.kld_p999:.4f}")),
    ("max", _of_divergence(lambda d: f"{d.kld_max:.3f}")),
    ("top-1", _of_divergence(lambda d: f"{d.top1:.2%}")),
    ("top-5", _of_divergence(lambda d: f"{d.top5_overlap:.2%}")),
    ("RMS of probabilities", _of_divergence(lambda d: f"{d.probability_rms:.2%}")),
    (
        "NLL less base",
        _of_divergence(lambda d: _with_error(d.nll_difference, d.nll_difference_stderr, ".4f")),
    ),
    ("weights file, MB", lambda r: _megabytes(r.size.file_bytes)),
    ("bits/weight, linears / whole", lambda r: _bits(r.size)),
    ("KV cache", lambda r: r.kv or ""),
    ("inputs", lambda r: r.inputs or ""),
    (
        "decode, tokens/s",
        _of_speed(lambda s: f"{s.decode:.1f} ({s.decode_min:.1f}-{s.decode_max:.1f})"),
    ),
    ("peak memory, MB", _of_speed(lambda s: _megabytes(s.peak_memory))),
]
