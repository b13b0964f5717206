"""Which layers of a model keep plain keys and values in the cache, and which formats suit them.

The other layers keep the state of a recurrence or a convolution, which lowbit leaves as it is.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..kernels.errors import UserError
from .spec import Group, KVSpec

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def plain_layers(config: Any) -> list[bool]:
    """For each layer of the model of a transformers config, whether it keeps plain ones."""
    return [type(layer) in PLAIN_LAYERS for layer in DynamicCache(config=config).layers]


def check_cache(spec: KVSpec, config: dict[str, Any]) -> None:
    """UserError where the model of this config.json could not store its cache as `spec`.

    What the config does not say (the heads of latent attention) is left to whoever runs the model.
    """
    config = config.get("text_config") or config
    layers = config.get("num_hidden_layers")
    if layers:
        beyond = [layer for layer in spec.skip_layers if layer >= layers]
        if beyond:
            raise UserError(
                f"skip_layers names layer {beyond[0]}, but the model's are 0 to {layers - 1}"
            )
        if len(set(spec.skip_layers)) == layers:
            raise UserError("skip_layers names every layer of the model; leave one to be quantized")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (hidden // heads if hidden and heads else None)
    if head_dim is None or "kv_lora_rank" in config:
        return
    for part in (spec.key, spec.value):
        if part is not None and isinstance(part.granularity, Group):
            size = part.granularity.size
            if head_dim % size:
                raise UserError(
                    f"groups of {size} channels do not divide a head of {head_dim}; choose a size "
                    "that does, or one scale a token"
                )
