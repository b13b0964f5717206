"""Which linears a quantization_config says are quantized and which it leaves alone, by its method's
own rules, against those that are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...kernels.errors import UserError
from ..checkpoint.ct_config import scheme_for_module, schemes_from_config
from ..checkpoint.patterns import name_pattern
from .findings import Finding, finding

WHERE = "config.json: quantization_config"
Rule = Callable[[str], str | None]  # a linear's name -> the entry that leaves it alone


def examine_claims(
    quantization: Mapping[str, Any],
    quantized: Collection[str],
    plain: Collection[str],
    head: str | None,
    folder: Path,
) -> Iterator[Finding]:
    """Linears stored as floats (`plain`) that the config says are quantized, and `quantized` ones
    that it leaves alone.

    head: the output linear, which GPTQ's, AWQ's and FP8's readers leave alone by themselves.
    """
    method = str(quantization.get("quant_method"))
    if method not in RULES:
        return
    try:
        kept = RULES[method](quantization)
        if method == "compressed-tensors":
            groups = schemes_from_config(dict(quantization), folder)
            plain = [m for m in plain if scheme_for_module(m, groups) is not None]
        elif not quantization.get("lm_head"):
            plain = [m for m in plain if m != head]
        claimed = [m for m in plain if kept(m) is None]
        left = {m: entry for m in quantized if (entry := kept(m)) is not None}
    except (UserError, re.error, AttributeError, TypeError) as e:
        yield finding("config", WHERE, "names and patterns of linears left alone", e)
        return
    for module in claimed:
        yield finding(
            "targeted, not quantized", f"{module}.weight", "codes, as config.json says",
            "a float weight that config.json does not leave out",
        )  # fmt: skip
    for module, entry in left.items():
        if method != "fp8" or _is_or_holds(entry, module):
            found = f"codes, though config.json leaves '{entry}' alone"
            yield finding("left alone, but quantized", module, "a float weight", found)


def _ignored(quantization: Mapping[str, Any]) -> Rule:
    """compressed-tensors: `ignore` names a linear, its class or a pattern of it."""
    ignore = [str(t) for t in quantization.get("ignore") or []]

    def rule(module: str) -> str | None:
        return next((t for t in ignore if _names(t, module)), None)

    return rule


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return name_pattern(target[3:]).match(module)
    return target in (module, "Linear")


def _listed(quantization: Mapping[str, Any]) -> Rule:
    """AWQ and fine-grained FP8: modules_to_not_convert, whose names may be parts."""
    kept = [str(k) for k in quantization.get("modules_to_not_convert") or []]
    return lambda module: next((k for k in kept if k in module), None)


def _is_or_holds(entry: str, module: str) -> bool:
    """Whether an entry is the linear or a module that it lies in, not just a part of its name."""
    return f".{module}.".find(f".{entry}.") >= 0


def _excluded(quantization: Mapping[str, Any]) -> Rule:
    """GPTQ: what `dynamic` excludes."""
    dynamic = quantization.get("dynamic") or {}
    excluded = [name_pattern(k.removeprefix("-:")) for k in dynamic if k.startswith("-:")]
    return lambda module: next((p.text for p in excluded if p.match(module)), None)


RULES: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "compressed-tensors": _ignored,
    "awq": _listed,
    "fp8": _listed,
    "gptq": _excluded,
}
