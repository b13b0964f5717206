"""Checkpoint layouts, one a file, each a `Layout` (base.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....kernels.errors import UserError, did_you_mean
from .awq import AWQ
from .base import Layout, Stored
from .compressed_tensors import CompressedTensors
from .gptq import GPTQ
from .hf_fp8 import HFFP8

__all__ = ["LAYOUTS", "NATIVE", "Layout", "Stored", "find_layout", "layout_named", "layout_of"]

NATIVE: Layout = CompressedTensors()
LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (NATIVE, GPTQ(1), GPTQ(2), AWQ(), HFFP8())
}


def layout_named(name: str) -> Layout:
    """The layout called `name`; UserError when there is none."""
    if name not in LAYOUTS:
        raise UserError(
            f"unknown format '{name}'{did_you_mean(name, LAYOUTS)} (known: {', '.join(LAYOUTS)})"
        )
    return LAYOUTS[name]


def find_layout(quantization: Mapping[str, Any]) -> Layout | None:
    """The layout that a `quantization_config` names, None when lowbit does not read it."""
    return next((layout for layout in LAYOUTS.values() if layout.claims(quantization)), None)


def layout_of(quantization: Mapping[str, Any]) -> Layout:
    """The layout that a `quantization_config` names; UserError when it is not read."""
    layout = find_layout(quantization)
    if layout is not None:
        return layout
    told = [quantization.get("quant_method"), quantization.get("checkpoint_format"),
            quantization.get("packing_format")]  # fmt: skip
    named = " ".join(f"'{word}'" for word in told if word)
    raise UserError(f"quantized with {named}; lowbit reads {', '.join(LAYOUTS)}")
