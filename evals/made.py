"""A run's outcome as a results file: what was made, by which methods, in what time; nothing is
measured on a text."""

from __future__ import annotations

from typing import Any

from ..kernels.device import resolve_device
from ..quantize.recipe import Recipe
from ..quantize.run_result import RunResult
from .linears import linear_results
from .report import environment, plain
from .results import header
from .size import size_report


def run_results(result: RunResult, device: str) -> dict[str, Any]:
    """The results file of `quantize run` on `device`, with one row."""
    row = {
        "name": result.out.name,
        "path": str(result.out),
        "size": size_report(result.out)._asdict(),
        "linears": plain(linear_results(result.out)),
        "made": made(result.recipe, result.seconds),
    }
    return {
        **header("run"),
        "environment": plain(environment(resolve_device(device))),
        "protocol": None,
        "rows": [row],
    }


def made(recipe: Recipe, seconds: float | None) -> dict[str, Any]:
    """How a recipe makes a checkpoint, in words: its passes, the schemes of those with one."""
    schemes = [scheme for p in recipe.passes if (scheme := getattr(p, "scheme", None))]
    return {
        "method": "+".join(p.method for p in recipe.passes),
        "scheme": "+".join(dict.fromkeys(schemes)) or None,
        "seconds": seconds,
    }
