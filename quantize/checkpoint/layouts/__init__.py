"""Checkpoint layouts, one a file, each a `Layout` (base.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....kernels.errors import UserError, did_you_mean
from .base import Layout, Stored
from .compressed_tensors import CompressedTensors

__all__ = ["LAYOUTS", "Layout", "Stored", "layout_named", "layout_of"]

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (CompressedTensors(),)}


def layout_named(name: str) -> Layout:
    """The layout called `name`; UserError when there is none."""
    if name not in LAYOUTS:
        raise UserError(
            f"unknown format '{name}'{did_you_mean(name, LAYOUTS)} (known: {', '.join(LAYOUTS)})"
        )
    return LAYOUTS[name]


def layout_of(quantization: Mapping[str, Any]) -> Layout:
    """The layout that a `quantization_config` names; UserError when it is not read."""
    for layout in LAYOUTS.values():
        if layout.claims(quantization):
            return layout
    raise UserError(
        f"quantized with '{quantization.get('quant_method')}'; lowbit reads {', '.join(LAYOUTS)}"
    )
