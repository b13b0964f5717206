"""What the output weighs, to the byte: the tensors that the layout stores, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...calib.shards import TensorInfo
from ..cache_layers import plain_layers
from ..checkpoint.layouts import Layout
from ..linear_plan import Plan
from ..spec import Head, KVSpec, LayerScheme
from .parallel import heads_of

CACHE_SCALE_BYTES = 4  # of a calibrated scale of the cache, float32


class Sources(NamedTuple):
    """Where the facts come from. info: the model's tensors. stored_name: a linear's name in the
    model -> its name among them."""

    info: Mapping[str, TensorInfo]
    stored_name: Callable[[str], str]
    layout: Layout


class StoredSize(NamedTuple):
    """weight: bytes of the tensors in place of a linear's weight; inputs, input_numbers: bytes and
    numbers of those that scale its inputs."""

    weight: int
    inputs: int
    input_numbers: int

    @property
    def total(self) -> int:
        return self.weight + self.inputs


class StoredSizes:
    """What quantized linears take in a layout; each shape and scheme is worked out once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[tuple[LayerScheme, tuple[int, int], torch.dtype], StoredSize] = {}

    def of(self, scheme: LayerScheme, shape: tuple[int, int], dtype: torch.dtype) -> StoredSize:
        """The size of a linear [out, in] whose weight the model stores in `dtype`."""
        key = scheme, shape, dtype
        if key not in self._known:
            weight = inputs = numbers = 0
            for name, stored in self._layout.tensors("it", scheme, shape, dtype).items():
                assert stored.dtype is not None, name
                count = math.prod(stored.shape)
                if name.startswith("it.input_"):
                    inputs, numbers = inputs + count * stored.dtype.itemsize, numbers + count
                else:
                    weight += count * stored.dtype.itemsize
            self._known[key] = StoredSize(weight, inputs, numbers)
        return self._known[key]


class Totals(NamedTuple):
    """tensor_bytes: of all tensors of the output, headers of files not counted; before: of the
    model's. weights: numbers that the output stands for; bits_per_weight: the output's over them.
    quantized_...: of the quantized linears alone, None where there are none."""

    tensor_bytes_before: int
    tensor_bytes: int
    weights: int
    bits_per_weight: float
    quantized_weights: int
    quantized_bits_per_weight: float | None


def totals(plan: Plan, sources: Sources, cache_scales: int = 0) -> Totals:
    """cache_scales: how many calibrated scales of the cache are stored."""
    planned = {f"{sources.stored_name(name)}.weight": p for name, p in plan.linears.items()}
    sizes = StoredSizes(sources.layout)
    after, plain = cache_scales * CACHE_SCALE_BYTES, cache_scales
    quantized = coded = 0
    for name, info in sources.info.items():
        if name in planned:
            size = sizes.of(planned[name].scheme, planned[name].shape, info.dtype)
            after += size.total
            coded += size.weight
            plain += size.input_numbers
            quantized += math.prod(planned[name].shape)
        else:
            after += info.nbytes
            plain += math.prod(info.shape)
    return Totals(
        tensor_bytes_before=sum(info.nbytes for info in sources.info.values()),
        tensor_bytes=after,
        weights=quantized + plain,
        bits_per_weight=8 * after / (quantized + plain),
        quantized_weights=quantized,
        quantized_bits_per_weight=8 * coded / quantized if quantized else None,
    )


def cache_scale_count(spec: KVSpec | None, config: Any) -> int:
    """How many scales of the cache a calibrated run stores. config: of transformers."""
    if spec is None or not spec.is_static:
        return 0
    layers = plain_layers(config)
    kept = sum(plain for i, plain in enumerate(layers) if i not in spec.skip_layers)
    heads = heads_of(config.to_dict()).keys_and_values or 1
    parts = [p for p in (spec.key, spec.value) if p is not None and not p.dynamic]
    return kept * sum(heads if isinstance(p.granularity, Head) else 1 for p in parts)
