"""AutoRound's own `quantization_config` in the words of the layouts that it packs linears in.

quant_method "auto-round" names the packing beside it: GPTQ's with zero-points minus one (version 1)
or as they are (version 2), or AWQ's. What single linears have otherwise stands in extra_config, by
name or pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

METHODS = ("auto-round", "intel/auto-round")
PACKINGS = {
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
    "auto_round:awq": {"quant_method": "awq", "version": "gemm"},
}


def published(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config as GPTQ's or AWQ's; itself where it is not AutoRound's or packs otherwise."""
    packing = PACKINGS.get(str(quantization.get("packing_format")))
    if quantization.get("quant_method") not in METHODS or packing is None:
        return quantization
    if quantization.get("data_type", "int") != "int" or (quantization.get("act_bits") or 16) < 16:
        return quantization
    return {**quantization, **packing, "dynamic": _dynamic(quantization.get("extra_config"))}


def _dynamic(extra: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(extra, Mapping):
        return {}
    return {_pattern(name): dict(differs) for name, differs in extra.items()}


def _pattern(name: str) -> str:
    """A name counts for that linear alone; anything that no name can be is a pattern."""
    return f"^{re.escape(name)}$" if re.fullmatch(r"[\w.]+", name) else name
