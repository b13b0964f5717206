"""The registry of what is shipped: each kernel with each of its tile configurations, as a case.

One list serves three readers. `kernels/audit` compiles every case for every target, and counts
the bytes that it moves in the interpreter; the tests compare small ones with the reference there;
and `evals/gpu_check.py` does the same with real ones on a device, where it also times them. An op
enters by a module in this folder with `cases(size)`, named in `FAMILIES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from .case import Case, Size

FAMILIES: tuple[str, ...] = (
    "wna16", "a8", "act_quant", "fp4", "attention", "latent", "kv_store", "norms", "experts",
)  # fmt: skip
"""Modules of this folder, in the order of the audit's table."""


def all_cases(size: Size, family: str | None = None) -> Iterator[Case]:
    """Every case of `family` (None: of all), in small shapes (for the interpreter) or real."""
    for name in FAMILIES if family is None else (family,):
        yield from importlib.import_module(f"{__name__}.{name}").cases(size)
