"""A quantized KV cache in a forward pass of whole windows, without generation.

Attention is handed what its keys and values would come back as from the runtime's cache, made by
the same functions. Where keys share scales over a group of tokens, a query sees the keys of its own
group quantized as well, which a runtime that decodes still holds dense: what is measured is no
better than what is served.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ..quantize.cache_layers import PLAIN_LAYERS
from ..quantize.checkpoint.kv_config import KVStorage
from ..runtime.kv_cache import cache_keyword
from ..runtime.kv_formats import layer_kv
from ..runtime.rope import RopeProbe


class FakeQuantizedKV:
    """What a forward pass of `model` is called with, to run under the cache of `storage`."""

    def __init__(self, model: Any, storage: KVStorage) -> None:
        self._config, self._storage = model.config, storage
        self._keyword = cache_keyword(model)
        self._probe = RopeProbe(model) if storage.spec.key_before_rope else None

    def arguments(self) -> dict[str, Any]:
        """Keywords of one forward pass; fresh ones for each."""
        layers = [
            _Layer(index, self._storage, self._probe) if type(layer) in PLAIN_LAYERS else layer
            for index, layer in enumerate(DynamicCache(config=self._config).layers)
        ]
        return {"use_cache": True, self._keyword: Cache(layers=layers)}


class _Layer(CacheLayerMixin):
    """Holds nothing: hands keys and values back as they would be stored."""

    is_sliding = False

    def __init__(self, index: int, storage: KVStorage, probe: RopeProbe | None) -> None:
        super().__init__()
        self._index, self._storage, self._probe = index, storage, probe

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        formats = layer_kv(self._storage, self._index, key_states, value_states)
        if formats is None:
            return key_states, value_states
        rope = None if self._probe is None else self._probe.rope(self._index, key_states)
        return formats.fake_quantize(key_states, value_states, rope)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
