"""Decode steps on a GPU, replayed as CUDA graphs against launched one by one: what is measured.

How is in gpu_decode.py, which needs transformers, as the rest of the check does not: without it
there is nothing here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from .gpu_speed import Speed, each

CONTEXTS = (1024, 8192)
SIZES = (1, 7, 32)
ENGINE = "engine"


def names() -> list[str]:
    """What `warm` and `speeds` take: the engine, and Llama 3.2 1B's shape with keys of each."""
    if importlib.util.find_spec("transformers") is None:
        return []
    return [ENGINE, *(f"1B x {context}" for context in CONTEXTS)]


def warm(name: str) -> None:
    """Nothing: capturing compiles what it needs, which is part of what is tried."""


def speeds(name: str) -> Iterator[Speed]:
    """The rows of the table for one of `names()`."""
    from .gpu_decode import engine_speeds, llama_1b_steps

    if name == ENGINE:
        yield from engine_speeds("cuda")
        return
    steps = llama_1b_steps(max(SIZES), int(name.rpartition(" x ")[2]))
    yield from each(SIZES, lambda size: steps.speed(f"decode {name}", size))
