"""The families that the decoder runs, and what it must know of each that its modules do not tell.

Modules keep Hugging Face's names. What a module or the config says (head sizes, windows, softcaps,
multipliers, biases) is read there; this table holds the rest: which norms stand where, and norms
that multiply by one more than their weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...quantize.planning.runtimes import runs_as_tape

FIXED_ROPES = {"default", "linear", "llama3", "yarn"}  # the same table at every length


class Family(NamedTuple):
    """The norms before and after a layer's two halves, by name in the layer; None where there is
    none. norm_offset: added to the weight of each norm. scaled_embedding: by sqrt(hidden_size)."""

    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    norm_offset: float = 0.0
    scaled_embedding: bool = False


_LLAMA = Family()
_GEMMA = Family(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    norm_offset=1.0,
    scaled_embedding=True,
)
FAMILIES = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "granite": _LLAMA,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "olmo2": Family(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
}


def decline_decoder(config: Any) -> str | None:
    """None, or why the decoder cannot run a model of this transformers config."""
    if config.model_type not in FAMILIES:
        return f"runs {', '.join(FAMILIES)}, not {config.model_type}"
    changing = rope_types(config) - FIXED_ROPES
    if changing:
        return f"has no rotary embedding of type {', '.join(sorted(changing))}"
    return None


def takes_tape(config: Any) -> bool:
    """Whether the decoder runs a model of this config as a tape on this CPU (taped.py)."""
    known = runs_as_tape(config.model_type, torch.device("cpu"))
    return known and decline_decoder(config) is None


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings that a config asks for, over all kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return {p.get("rope_type", "default") for p in nested or [parameters]}
