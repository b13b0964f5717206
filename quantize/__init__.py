"""Quantization: specs, recipes, passes, checkpoints, GGUF export and the command line.

The functions of FACE do what the commands of their names do: they return typed results and print
nothing. Each is imported when it is first asked for, so that importing this package costs nothing.
A module of this package may not have the name of one of them: once imported, it would stand in the
function's place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import convert
    from .planning.make import plan
    from .runner import quantize_model as run
    from .verification import verify

__all__ = ["convert", "plan", "run", "verify"]

FACE = {  # name -> module, function
    "convert": ("conversion", "convert"),
    "plan": ("planning.make", "plan"),
    "run": ("runner", "quantize_model"),
    "verify": ("verification", "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = FACE[name]
    return getattr(importlib.import_module(f".{module}", __name__), function)


def __dir__() -> list[str]:
    return sorted([*globals(), *FACE])
