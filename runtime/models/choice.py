"""Which of the two decoders runs a model: ours for the families that it knows, else its module."""

from __future__ import annotations

from typing import Any, TypeAlias

from ...kernels.compiled import prefers_compiled
from .decoder import Decoder
from .families import decline_decoder
from .hf_module import ModuleDecoder, decline_module

AnyDecoder: TypeAlias = "Decoder | ModuleDecoder"


def make_decoder(model: Any, max_len: int, batch_invariant: bool = False) -> AnyDecoder:
    """The decoder of a loaded model that `decline_model` does not decline. max_len: the longest
    sequence. batch_invariant: rows have the same bits in every batch."""
    if decline_decoder(model.config) is None:
        return Decoder(model, max_len, batch_invariant, prefers_compiled())
    return ModuleDecoder(model)


def decline_model(model: Any) -> str | None:
    """None, or why neither can run a loaded model over blocks."""
    reason = decline_decoder(model.config)
    if reason is None:
        return None
    module = decline_module(model)
    return None if module is None else f"{reason}, and the model's own module {module}"
