"""Results with the protocol that gives them meaning, as Markdown and as JSON.

A `Report` cannot be made without its text's hash, windows, dtype, device and versions, and nothing
else here prints a number.
"""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .definitions import definitions
from .divergence import Divergence
from .generation import Generation
from .linears import LinearResult
from .perplexity import Perplexity
from .results import header
from .size import SizeReport
from .speed import DecodeSpeed
from .tasks import TaskResult
from .windows import Windowing

PACKAGES = ("torch", "transformers", "tokenizers", "lowbit")


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


class Computed(NamedTuple):
    """By what: its name with its version. top: likeliest tokens that it tells of a position, at
    most; None where it gives them all."""

    name: str
    top: int | None = None


class Row(NamedTuple):
    """One model's results; None: not measured. `linears`: of a checkpoint that lowbit has made."""

    name: str
    path: str
    perplexity: Perplexity
    divergence: Divergence | None
    size: SizeReport | None  # None of a server
    speed: DecodeSpeed | None
    kv: str | None = None  # how the KV cache is quantized
    linears: list[LinearResult] | None = None
    tasks: list[TaskResult] | None = None
    inputs: str | None = None  # whose rounding of what matrices read was imitated
    generation: Generation | None = None
    engine: Computed | None = None  # what computed it where transformers' forward pass did not
    bench: dict[str, Any] | None = None  # a server's latency, as of quantize bench


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
        results = {**header(command), **plain(self)}
        return {**results, "definitions": definitions(results)}

    def to_json(self) -> str:
        """One JSON object, with a final newline."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """A table, then everything that its numbers depend on."""
        from .report_lines import markdown

        return markdown(self)


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
