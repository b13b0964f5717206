"""Keys and values of a batch in one tensor a layer, allocated once.

A layer's keys are [batch, kv_heads, max_len, head_dim]. Prompts are computed one at a time, each
into its own row and ending at the same column; decode then appends one column to all rows at once.
So a prompt costs what it would alone, without padding, and rows of different length differ only in
how many columns at their left are masked.

The layers follow transformers' cache interface, so that any of its models can use them. Layers
whose state is not plain keys and values (recurrent and convolution states) stay transformers' own;
a model that has such layers is run one request at a time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class ContiguousLayer(CacheLayerMixin):
    """One layer's keys and values; `row`, `start` and `length` say where the next ones go.

    Sliding-window layers keep all columns too: the model's mask hides those out of the window.
    """

    is_sliding = False

    def __init__(self, batch: int, max_len: int) -> None:
        super().__init__()
        self.batch, self.max_len = batch, max_len
        self.row: int | None = None  # None: all rows
        self.start = 0  # first column of the rows in use
        self.length = 0  # columns filled from there on

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def allocate(states: Tensor) -> Tensor:
            # zeros: a masked column must not hold NaN, which would survive a weight of zero
            return states.new_zeros(self.batch, states.shape[1], self.max_len, states.shape[3])

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [rows, kv_heads, n, head_dim] and return all columns so far of those rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows = slice(None) if self.row is None else slice(self.row, self.row + 1)
        begin = self.start + self.length
        self.length += key_states.shape[2]
        end = self.start + self.length
        assert end <= self.max_len, (end, self.max_len)
        keys, values = self.keys[rows], self.values[rows]
        keys[:, :, begin:end] = key_states
        values[:, :, begin:end] = value_states
        return keys[:, :, self.start : end], values[:, :, self.start : end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_len


class KVCache(Cache):
    """The cache of one batch: place a prompt's row, then decode all rows, then keep the unfinished.

    config: the model's transformers config. batch: rows. max_len: columns, prompt and output.
    """

    def __init__(self, config: Any, batch: int, max_len: int) -> None:
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            plain = type(layer) in PLAIN_LAYERS
            layers.append(ContiguousLayer(batch, max_len) if plain else layer)
        super().__init__(layers=layers)
        self._contiguous = [x for x in layers if isinstance(x, ContiguousLayer)]
        assert batch == 1 or batchable(config), "this model's layers hold one request's state"

    def place_prompt(self, row: int, start: int) -> None:
        """The next forward pass fills `row` from column `start` on."""
        for layer in self._contiguous:
            layer.row, layer.start, layer.length = row, start, 0

    def place_decode(self, length: int) -> None:
        """The next forward passes append to all rows, after `length` columns."""
        for layer in self._contiguous:
            layer.row, layer.start, layer.length = None, 0, length

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows` (int64, ascending)."""
        for layer in self._contiguous:
            layer.batch = rows.numel()
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys.index_select(0, rows)
                layer.values = layer.values.index_select(0, rows)


def batchable(config: Any) -> bool:
    """Whether all of the model's state is plain keys and values, so that rows can share a batch."""
    return all(type(layer) in PLAIN_LAYERS for layer in DynamicCache(config=config).layers)
