"""The words of a measurement, each told where it was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def _any(field: str) -> Callable[[Json], bool]:
    """Whether any row has that."""
    return lambda results: any(row.get(field) is not None for row in results["rows"])


def _counted(results: Json) -> bool:
    return any((row["size"] or {}).get("bits_per_weight") is not None for row in results["rows"])


def _windowing(results: Json, rule: str) -> bool:
    """Whether the windows have that rule; so do, in a sense, those of no protocol."""
    protocol = results["protocol"]
    return protocol is None or protocol["windowing"][rule]


def _is_told(row: Json) -> bool:
    engine = row.get("engine")
    return engine is not None and engine["top"] is not None and row.get("divergence") is not None


DEFINITIONS: dict[str, Callable[[Json], bool]] = {
    "perplexity: exp of the mean negative log-likelihood (nats) of every fresh token of a window "
    "but its first": _any("perplexity"),
    "KLD: KL(base || model) in nats at every fresh position; log-probabilities in float32": _any(
        "divergence"
    ),
    "top-1: share of positions where base and model rank the same token first; top-5: share of the "
    "base's five likeliest tokens that are among the model's five": _any("divergence"),
    "RMS of probabilities: of the text's token, the model's less the base's, over scored "
    "tokens": _any("divergence"),
    "noise floor: the base against itself with weights and computation in "
    "bfloat16": lambda results: results.get("noise_floor") is not None,
    "of an engine that tells its likeliest tokens alone, all others count as one token: its KLD is "
    "a lower bound": lambda results: any(map(_is_told, results["rows"])),
    "standard errors: windows are the unit; that of the perplexity is perplexity x that of the "
    "mean; none with one window": _any("perplexity"),
    "text: joined and tokenized once, without special tokens": lambda results: (
        not _windowing(results, "special")
    ),
    "a partial window at the end is dropped": lambda results: not _windowing(results, "tail"),
    "bits per weight: all bits stored in place of the quantized linears' weights (scales, "
    "zero-points, shapes counted); whole model: of all tensors over all weights": _counted,
    "decode: one request, greedy, in a process of its own, median of the repeats "
    "(slowest-fastest)": _any("speed"),
}


def definitions(results: Json) -> list[str]:
    """Those that the rows of a results file need; none of what was not measured."""
    return [words for words, needed in DEFINITIONS.items() if needed(results)]
