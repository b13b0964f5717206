"""What is done for experts that calibration showed few tokens, and what the report says of it.

A router spreads tokens unevenly, so some experts' Hessians are sums over few tokens or none. GPTQ
trusts its Hessian: with fewer tokens than input columns it moves the rounding errors where it
believes that nothing is read, and can do worse than rounding to nearest. Measured on linears of
trained models (docs/methods.md), with Hessians of n tokens for c input columns: damping by c / n of
the mean diagonal, at most 1, keeps GPTQ ahead of rounding to nearest down to about n = c / 16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from .linear_plan import Plan
from .passes.settings import MAX_DAMP, GPTQSettings
from .recipe import Recipe
from .spec import LayerScheme

TOKENS_A_COLUMN = 1 / 16  # with fewer, an expert's linear is rounded to nearest


def with_all_tokens(recipe: Recipe, plan: Plan, experts: Collection[str]) -> Recipe:
    """`recipe`, calibrating experts on all tokens where a scale of their inputs is stored: such a
    scale has to cover what an expert may yet be given.

    experts: paths of the model's experts modules.
    """
    inside = tuple(f"{path}." for path in experts)
    stored = any(
        _stores_input_scale(planned.scheme)
        for name, planned in plan.linears.items()
        if name.startswith(inside)
    )
    if not stored:
        return recipe
    return replace(recipe, calibration=replace(recipe.calibration, all_experts=True))


def _stores_input_scale(scheme: LayerScheme) -> bool:
    inputs = scheme.input_activations
    return inputs is not None and (not inputs.dynamic or inputs.scale_dtype == "e4m3")


def why_rounded(tokens: int, columns: int) -> str | None:
    """Why an expert's linear that saw so many tokens is rounded to nearest; None: it is not."""
    if tokens >= TOKENS_A_COLUMN * columns:
        return None
    return (
        f"its expert saw {tokens} tokens, too few for {columns} input columns: rounded to nearest"
    )


def dampened(settings: GPTQSettings, tokens: int, columns: int) -> GPTQSettings:
    """`settings` with the damping that a Hessian of so many tokens needs."""
    needed = min(MAX_DAMP, columns / max(1, tokens))
    return replace(settings, dampening_frac=max(settings.dampening_frac, needed))


def coverage(linears: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of every layer's experts, by path: how many tokens the router gives each (routed_tokens, in
    the order of the experts), and which were rounded to nearest for want of them (fallback).

    linears: the reports of linears by name; those of experts have "routed_tokens".
    """
    found: dict[str, dict[int, tuple[int, bool]]] = {}
    for name, report in linears.items():
        if report.get("routed_tokens") is not None:
            path, expert, _ = name.rsplit(".", 2)
            experts = found.setdefault(path, {})
            _, before = experts.get(int(expert), (0, False))
            experts[int(expert)] = report["routed_tokens"], before or "fallback" in report
    return {
        path: {
            "routed_tokens": [experts[e][0] for e in sorted(experts)],
            "fallback": [e for e in sorted(experts) if experts[e][1]],
        }
        for path, experts in found.items()
    }


def coverage_notes(covered: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence on the experts that saw too few tokens, if there are any."""
    few = [f"{path}.{expert}" for path, c in covered.items() for expert in c["fallback"]]
    if not few:
        return []
    total = sum(len(c["routed_tokens"]) for c in covered.values())
    return [
        f"{len(few)} of {total} experts saw too few tokens and were rounded to nearest, first "
        f"{few[0]}; more samples or --all-experts would calibrate them"
    ]
