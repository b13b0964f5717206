"""Keys and values of a batch in one tensor a layer, allocated once.

A layer's keys are [batch, kv_heads, max_len, head_dim]. Prompts are computed one at a time, each
into its own row and ending at the same column; decode then appends one column to all rows at once.
So a prompt costs what it would alone, without padding, and rows of different length differ only in
how many columns at their left are masked.

The layers follow transformers' cache interface, so that any of its models can use them. Layers
whose state is not plain keys and values (recurrent and convolution states) stay transformers' own;
a model that has such layers is run one request at a time.

A quantized cache keeps codes (runtime/kv_stores.py) and dequantizes a layer's when it is read.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ..kernels.kv_quant import KVFormat
from ..quantize.cache_layers import PLAIN_LAYERS, plain_layers
from ..quantize.checkpoint.kv_config import KVStorage
from .kv_formats import layer_kv
from .kv_stores import DenseStore, Store, TokenGroupStore, TokenStore
from .rope import Rope, RopeProbe, RopeTable


class ContiguousLayer(CacheLayerMixin):
    """One layer's keys and values; `row`, `start` and `length` say where the next ones go.

    Sliding-window layers keep all columns too: the model's mask hides those out of the window.
    probe: gives the rotary embedding of the keys that layer number `index` is handed, where they
    are stored as before it.
    """

    is_sliding = False

    def __init__(
        self, index: int, max_len: int, make_stores: _StoreMaker, probe: RopeProbe | None
    ) -> None:
        super().__init__()
        self.index, self.max_len, self.probe = index, max_len, probe
        self._make_stores = make_stores
        self._stores: tuple[Store, Store] | None = None
        self.row: int | None = None  # None: all rows
        self.start = 0  # first column of the rows in use
        self.length = 0  # columns filled from there on

    def place(self, row: int | None, start: int, length: int) -> None:
        """The next forward pass fills `row` (None: all) after `length` columns from `start` on."""
        self.row, self.start, self.length = row, start, length
        for store in self._stores or ():
            store.place(row, start)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rope = self._rope(key_states)
        self._stores = self._make_stores(self.index, key_states, value_states, rope)
        self.is_initialized = True
        self.place(self.row, self.start, self.length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [rows, kv_heads, n, head_dim] and return all columns so far of those rows."""
        if self._stores is None:
            self.lazy_initialization(key_states, value_states)
        assert self._stores is not None
        begin = self.start + self.length
        self.length += key_states.shape[2]
        end = self.start + self.length
        assert end <= self.max_len, (end, self.max_len)
        rope = self._rope(key_states)
        for store, states in zip(self._stores, (key_states, value_states), strict=True):
            store.write(states, begin, rope)
        keys, values = self._stores
        return keys.read(end), values.read(end)

    def keep(self, rows: Tensor) -> None:
        for store in self._stores or ():
            store.keep(rows)

    def _rope(self, keys: Tensor) -> Rope | None:
        return None if self.probe is None else self.probe.rope(self.index, keys)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores or ())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_len


class KVCache(Cache):
    """The cache of one batch: place a prompt's row, then decode all rows, then keep the unfinished.

    config: the model's transformers config. batch: rows. max_len: columns, prompt and output.
    storage: how it is quantized (None: dense). probe: on the model, where keys are stored as before
    their rotary embedding.
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        max_len: int,
        storage: KVStorage | None = None,
        probe: RopeProbe | None = None,
    ) -> None:
        assert batch == 1 or batchable(config), "this model's layers hold one request's state"
        self.max_len = max_len
        make_stores = _StoreMaker(storage, batch, max_len)
        if storage is None or not storage.spec.key_before_rope:
            probe = None
        layers: list[Any] = []
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if type(layer) in PLAIN_LAYERS:
                layer = ContiguousLayer(index, max_len, make_stores, probe)
            layers.append(layer)
        super().__init__(layers=layers)
        self._contiguous = [x for x in layers if isinstance(x, ContiguousLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values are kept in."""
        return sum(layer.nbytes for layer in self._contiguous)

    def place_prompt(self, row: int, start: int) -> None:
        """The next forward pass fills `row` from column `start` on."""
        for layer in self._contiguous:
            layer.place(row, start, 0)

    def place_decode(self, length: int) -> None:
        """The next forward passes append to all rows, after `length` columns."""
        for layer in self._contiguous:
            layer.place(None, 0, length)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows` (int64, ascending)."""
        for layer in self._contiguous:
            layer.keep(rows)


class _StoreMaker:
    """Makes each layer's stores when its first keys and values are there."""

    def __init__(self, storage: KVStorage | None, batch: int, max_len: int) -> None:
        self._storage, self._batch, self._max_len = storage, batch, max_len
        self._tables: dict[int, RopeTable] = {}

    def __call__(
        self, index: int, keys: Tensor, values: Tensor, rope: Rope | None
    ) -> tuple[Store, Store]:
        batch, max_len = self._batch, self._max_len
        formats = self._storage and layer_kv(self._storage, index, keys, values)
        if formats is None:
            return DenseStore(batch, max_len), DenseStore(batch, max_len)
        # layers that are handed the same cosines share a table of them
        table = rope and self._tables.setdefault(id(rope.cos), RopeTable(max_len))
        return (
            _store(formats.key, formats.scales.key, batch, max_len, table),
            _store(formats.value, formats.scales.value, batch, max_len, None),
        )


def _store(
    fmt: KVFormat | None,
    scale: Tensor | None,
    batch: int,
    max_len: int,
    table: RopeTable | None,
) -> Store:
    if fmt is None:
        return DenseStore(batch, max_len)
    if fmt.axis == "tokens":
        return TokenGroupStore(batch, fmt, table)
    return TokenStore(batch, max_len, fmt, scale)


def batchable(config: Any) -> bool:
    """Whether all of the model's state is plain keys and values, so that rows can share a batch."""
    return all(plain_layers(config))


def cache_keyword(model: Any) -> str:
    """What `model` calls the argument that takes a cache: transformers renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
