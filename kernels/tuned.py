"""Tiles that were timed on a device, in place of the shipped ones.

`quantize tune` writes them to one JSON file for each kind of device and version of Triton, below
the user's cache; a device without a file runs what is shipped. A choice holds for one kind of
weight (`weight_key`) up to a number of tokens. Within a choice a token's result has the same bits
in every batch; where a problem is batch-invariant, no choice is looked for.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import UserError
from .linear_ops import LinearProblem
from .triton_ops.tiles import GemmConfig

VERSION = 1  # of the file


class Tuned(NamedTuple):
    """The choice for up to `rows` tokens. config: None for the dense product of a dequantized
    weight. seconds, shipped_seconds: of it and of the shipped choice, when they were timed."""

    key: str
    rows: int
    config: GemmConfig | None
    seconds: float
    shipped_seconds: float


@functools.lru_cache(maxsize=1024)
def weight_key(kernel: str, problem: LinearProblem) -> str:
    """The kind of weight that choices of `kernel` hold for."""
    zero = "sym" if problem.symmetric else "asym"
    inputs = "" if problem.activation is None else f", inputs of {problem.activation.elements.name}"
    return (
        f"{kernel} {problem.kind}{problem.num_bits} g{problem.group_size} {zero}, "
        f"{problem.out_features} x {problem.in_features}, "
        f"{str(problem.dtype).removeprefix('torch.')}{inputs}"
    )


def tuned_file(device: str) -> Path:
    """Where choices for the kind of GPU called `device` are kept for this version of Triton."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{device} triton {version('triton')}").strip("-")
    return Path(root) / "lowbit" / "tuned" / f"{name}.json"


def read_tuned(path: Path) -> list[Tuned]:
    """The choices of a file; none where there is no file. UserError for one that is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']} where {VERSION} is read")
        return [_choice(item) for item in data["choices"]]
    except (ValueError, KeyError, TypeError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise UserError(
            f"{path}, what `quantize tune` has written, cannot be read ({reason}); remove it, or "
            "tune again"
        ) from e


def write_tuned(path: Path, device: str, choices: Iterable[Tuned]) -> None:
    """Put `choices` into the file, in place of those of the same weights and tokens."""
    merged = {(c.key, c.rows): c for c in [*read_tuned(path), *choices]}
    data = {
        "version": VERSION, "device": device, "triton": version("triton"),
        "choices": [_plain(merged[at]) for at in sorted(merged)],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
    _choices_on.cache_clear()


def tuned_choice(
    kernel: str, problem: LinearProblem, rows: int, device: torch.device
) -> Tuned | None:
    """What was found best for `rows` tokens on `device`; None where nothing was timed."""
    if device.type != "cuda" or problem.batch_invariant:
        return None
    rising = _choices_on(device_name(device)).get(weight_key(kernel, problem), ())
    return next((choice for choice in rising if rows <= choice.rows), None)


@functools.lru_cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.lru_cache
def _choices_on(device: str) -> dict[str, tuple[Tuned, ...]]:
    """By kind of weight, in rising order of their tokens."""
    found: dict[str, list[Tuned]] = {}
    for choice in read_tuned(tuned_file(device)):
        found.setdefault(choice.key, []).append(choice)
    return {key: tuple(sorted(cs, key=lambda c: c.rows)) for key, cs in found.items()}


def _plain(choice: Tuned) -> dict[str, Any]:
    config = None if choice.config is None else choice.config._asdict()
    return {**choice._asdict(), "config": config}


def _choice(item: dict[str, Any]) -> Tuned:
    config = item["config"]
    if config is not None:
        config = GemmConfig(**{name: int(value) for name, value in config.items()})
        if min(config) < 1 or any(size & (size - 1) for size in config[:4]):
            raise ValueError(f"{config}: sizes are powers of two")
    return Tuned(
        str(item["key"]), int(item["rows"]), config, float(item["seconds"]),
        float(item["shipped_seconds"]),
    )  # fmt: skip
