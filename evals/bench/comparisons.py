"""Ready-made comparisons: what our engine does one way and the other, by options of LLM."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...kernels.errors import UserError


class Variant(NamedTuple):
    """options: of LLM, beside those that the bench gives all."""

    name: str
    options: dict[str, Any]


PLAIN = Variant("lowbit", {})
COMPARISONS: dict[str, tuple[Variant, ...]] = {  # the first is what the others are held against
    "batching": (Variant("static", {"batching": "static"}), Variant("continuous", {})),
    "prefix-cache": (
        Variant("no prefix cache", {"enable_prefix_caching": False}),
        Variant("prefix cache", {"enable_prefix_caching": True}),
    ),
    "kv": tuple(  # int4 itself has keys by channel, which the paged engine does not store
        Variant(f"KV {name}", {"kv_cache_dtype": name})
        for name in ("model", "int8", "fp8_dynamic", "int4_token", "int4_hadamard")
    ),
    "speculation": (
        Variant("no speculation", {}),
        Variant("n-gram speculation", {"speculate": "ngram"}),
    ),
}


def variants_of(comparison: str | None) -> tuple[Variant, ...]:
    """Those of a comparison; one that is nothing special where none is named."""
    if comparison is None:
        return (PLAIN,)
    if comparison not in COMPARISONS:
        raise UserError(f"--compare is one of {', '.join(COMPARISONS)}, got '{comparison}'")
    return COMPARISONS[comparison]
