"""Static scales of the KV cache: what calibration rows put into it, and the scale that suits it.

Dynamic formats need none of this. A static scale serves all keys (or values) of a layer, or of one
of its heads. It is taken from the last forward pass of the calibration rows through a layer, when
its weights are as they will be stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.affine import round_to_codes
from ...kernels.elements import Elements, elements_of
from ...kernels.kv_quant import SMALLEST_SCALE, rotate_heads
from ..cache_layers import plain_layers
from ..checkpoint.kv_config import KVScales
from ..spec import Head, KVSpec, QuantSpec
from .settings import KVCacheSettings

SAMPLED_EVERY = 16  # tokens: of these the error is computed, of all the range
RATIOS = tuple(1 - 0.025 * i for i in range(21))  # of the range: 1.0 down to 0.5
CACHE_KEYWORDS = ("cache", "past_key_values")


class KVObserver:
    """Sees the keys and values of the attention modules of a layer while it is watched."""

    def __init__(self, spec: KVSpec, settings: KVCacheSettings, config: Any) -> None:
        """config: the model's transformers config."""
        self._spec, self._settings = spec, settings
        plain = enumerate(plain_layers(config))
        observed = {i for i, is_plain in plain if is_plain and i not in spec.skip_layers}
        self._layers = observed if spec.is_static else set()
        self._seen: dict[str, tuple[_Seen, _Seen]] = {}

    @contextmanager
    def watching(self, layer_name: str, layer: nn.Module) -> Iterator[None]:
        """While open, what the layer's attention would cache is observed; it computes as before.

        What was seen of the layer earlier is forgotten.
        """
        handles = []
        for name, module in layer.named_modules(prefix=layer_name):
            keyword = _cache_keyword(module)
            if module is not layer and keyword and module.layer_idx in self._layers:
                seen = (_Seen(self._spec.rotate_key), _Seen(self._spec.rotate_value))
                self._seen[name] = seen
                hook = _putting(keyword, _Recorder(seen))
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, layer_name: str) -> dict[str, KVScales]:
        """Name of the attention module -> the scales of its keys and values, and forget them."""
        names = [n for n in self._seen if n.startswith(f"{layer_name}.")]
        scales = {}
        for name in names:
            keys, values = self._seen.pop(name)
            if keys.peak is not None:  # it cached something
                scales[name] = KVScales(
                    self._scale(self._spec.key, keys), self._scale(self._spec.value, values)
                )
        return scales

    def _scale(self, part: QuantSpec | None, seen: _Seen) -> Tensor | None:
        if part is None or part.dynamic:
            return None
        assert seen.peak is not None
        return choose_static_scale(
            torch.cat(seen.samples, dim=1),
            seen.peak,
            elements_of(part.type, part.num_bits),
            by_head=isinstance(part.granularity, Head),
            search=self._settings.scale_search == "mse",
        )


def choose_static_scale(
    samples: Tensor, peak: Tensor, elements: Elements, by_head: bool, search: bool
) -> Tensor:
    """The scale float32 [1], or [heads] where `by_head`.

    samples: float32 [heads, tokens, head_dim]. peak: the largest magnitude of each head, [heads],
    in all that was observed. search: the share of the range with the least squared error on the
    samples; otherwise the whole range.
    """
    if not by_head:
        peak = peak.amax(0, keepdim=True)
    whole = (peak / elements.highest).clamp_(min=SMALLEST_SCALE)
    if not search:
        return whole
    groups = samples if by_head else samples.flatten(0, 1)[None]
    best, least = whole, torch.full_like(whole, torch.inf)
    for ratio in RATIOS:
        scale = whole * ratio
        rounded = round_to_codes(groups, scale[:, None, None], None, elements)
        error = rounded.mul_(scale[:, None, None]).sub_(groups).square_().sum((1, 2))
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


class _Seen:
    """The range of each head and samples, of keys or values as they are before rounding."""

    def __init__(self, rotate: bool) -> None:
        self._rotate = rotate
        self.peak: Tensor | None = None  # [heads]
        self.samples: list[Tensor] = []  # [heads, tokens, head_dim] each

    def add(self, x: Tensor) -> None:
        """x [rows, heads, tokens, head_dim]; rows that are not finite are left out."""
        x = x.float()
        x = x[torch.isfinite(x).flatten(1).all(1)]
        if len(x) == 0:
            return
        if self._rotate:
            x = rotate_heads(x)
        peak = x.abs().amax((0, 2, 3))
        self.peak = peak if self.peak is None else torch.maximum(self.peak, peak)
        self.samples.append(x[:, :, ::SAMPLED_EVERY].transpose(0, 1).flatten(1, 2).clone())


class _Recorder:
    """Stands in for a cache that holds nothing: notes what it is given and hands it back."""

    def __init__(self, seen: tuple[_Seen, _Seen]) -> None:
        self._seen = seen

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for seen, states in zip(self._seen, (keys, values), strict=True):
            seen.add(states)
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0


def _putting(keyword: str, recorder: _Recorder) -> Any:
    """A forward pre-hook that gives a module `recorder` for its cache."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, keyword: recorder}

    return hook


def _cache_keyword(module: nn.Module) -> str | None:
    """The argument that takes the cache, of a module that caches keys and values; else None."""
    if not hasattr(module, "layer_idx"):
        return None
    accepted = inspect.signature(module.forward).parameters
    return next((keyword for keyword in CACHE_KEYWORDS if keyword in accepted), None)
