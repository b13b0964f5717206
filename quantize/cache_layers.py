"""Which layers of a model keep plain keys and values in the cache.

The others keep the state of a recurrence or a convolution, which lowbit leaves as it is.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def plain_layers(config: Any) -> list[bool]:
    """For each layer of the model of a transformers config, whether it keeps plain ones."""
    return [type(layer) in PLAIN_LAYERS for layer in DynamicCache(config=config).layers]
