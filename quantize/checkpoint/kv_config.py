"""How the cache is quantized, in config.json, and its calibrated scales among the tensors.

What compressed-tensors and vLLM can express stands in `kv_cache_scheme` of quantization_config:
keys and values alike, int8 or E4M3, one static scale a layer or a head (tensors k_scale and v_scale
of the attention module), or dynamic ones of a token. Everything else (fewer bits, channels of keys,
rotations, widths of their own, skipped layers) stands in a key of lowbit's, `lowbit_kv_cache`, at
the top of config.json; other programs ignore it and keep the cache in the model's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from ..spec import Granularity, Group, Head, KVSpec, QuantSpec, TensorWise, Token, TokenGroup

OWN_KEY = "lowbit_kv_cache"
SCALE_NAMES = ("k_scale", "v_scale")
LAYER = re.compile(r"\.(\d+)\.")
_STRATEGIES: dict[str, Granularity] = {
    "tensor": TensorWise(), "attn_head": Head(), "token": Token(),
}  # fmt: skip
_SIZED: dict[str, type[Group | TokenGroup]] = {"group": Group, "token_group": TokenGroup}


class KVScales(NamedTuple):
    """The calibrated scales of a layer, float32 [1] or [kv_heads]; None where they are dynamic."""

    key: Tensor | None
    value: Tensor | None


class KVStorage(NamedTuple):
    """How a model's cache is stored. scales: by the layer's number; none where all are dynamic."""

    spec: KVSpec
    scales: dict[int, KVScales]


def kv_cache_scheme(spec: KVSpec) -> dict[str, Any] | None:
    """The `kv_cache_scheme` of quantization_config; None when it cannot express `spec`."""
    return _part_to_dict(spec.key) if spec.key is not None and _is_standard(spec) else None


def own_kv_config(spec: KVSpec) -> dict[str, Any] | None:
    """The value of OWN_KEY; None when `kv_cache_scheme` says everything."""
    if _is_standard(spec):
        return None
    return {
        "key": spec.key and _part_to_dict(spec.key),
        "value": spec.value and _part_to_dict(spec.value),
        "rotate_key": spec.rotate_key,
        "rotate_value": spec.rotate_value,
        "key_before_rope": spec.key_before_rope,
        "skip_layers": list(spec.skip_layers),
    }


def with_kv_cache(config: dict[str, Any], spec: KVSpec, version: str) -> dict[str, Any]:
    """A config.json that also says that the cache is stored as `spec`.

    config: quantization_config may be absent, as that of a model whose weights stay as they are.
    version: lowbit's, for a quantization_config that has to be made.
    """
    own, scheme = own_kv_config(spec), kv_cache_scheme(spec)
    if own is not None:
        return {**config, OWN_KEY: own}
    quantization = config.get("quantization_config") or {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "global_compression_ratio": None,
        "producer": {"name": "lowbit", "version": version},
    }
    return {**config, "quantization_config": {**quantization, "kv_cache_scheme": scheme}}


def kv_spec_from_config(config: dict[str, Any]) -> KVSpec | None:
    """The KVSpec of a config.json; None when the cache is not quantized. UserError when damaged."""
    own = config.get(OWN_KEY)
    standard = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    try:
        if own is not None:
            return KVSpec(
                own["key"] and _part_from_dict(own["key"]),
                own["value"] and _part_from_dict(own["value"]),
                bool(own["rotate_key"]),
                bool(own["rotate_value"]),
                bool(own["key_before_rope"]),
                tuple(int(layer) for layer in own["skip_layers"]),
            )
        if standard is None:
            return None
        part = _part_from_dict(standard)
        return KVSpec(part, part)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as e:
        where = OWN_KEY if own is not None else "kv_cache_scheme"
        raise UserError(
            f"{where} of config.json is not that of a quantized cache ({type(e).__name__}: {e})"
        ) from e


def read_kv_storage(config: dict[str, Any], shards: TensorSource) -> KVStorage | None:
    """The cache's spec and scales of a checkpoint; None when its cache is not quantized.

    Raises UserError when scales are missing or damaged.
    """
    spec = kv_spec_from_config(config)
    if spec is None:
        return None
    found: dict[int, dict[str, Tensor]] = {}
    for name in scale_names(shards.names()):
        numbers = LAYER.findall(name)
        if numbers:
            found.setdefault(int(numbers[0]), {})[name.rpartition(".")[2]] = _scale(name, shards)
    scales = {n: KVScales(s.get("k_scale"), s.get("v_scale")) for n, s in found.items()}
    return KVStorage(spec, scales if spec.is_static else {})


def scale_names(names: Iterable[str]) -> list[str]:
    """Those of `names` that are the cache's scales."""
    return [n for n in names if n.rpartition(".")[2] in SCALE_NAMES]


def scale_tensors(attention: str, scales: KVScales, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer's calibrated scales. attention: the name of its attention module.

    One scale is stored as [1], one for each head as [kv_heads, 1, 1], as compressed-tensors does.
    """
    return {
        f"{attention}.{name}": scale if scale.numel() == 1 else scale.view(-1, 1, 1)
        for name, scale in zip(SCALE_NAMES, (_cast(s, dtype) for s in scales), strict=True)
        if scale is not None
    }


def _cast(scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if scale is None else scale.reshape(-1).to(dtype)


def _scale(name: str, shards: TensorSource) -> Tensor:
    scale = shards.get(name).float().reshape(-1).clone()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise UserError(f"'{name}' must hold positive finite numbers: the checkpoint is damaged")
    return scale


def _is_standard(spec: KVSpec) -> bool:
    """Whether compressed-tensors' kv_cache_scheme can say it."""
    part = spec.value
    return (
        part is not None
        and spec == KVSpec(part, part)
        and part.num_bits == 8
        and part.symmetric
        and isinstance(part.granularity, TensorWise | Head | Token)
    )


def _part_to_dict(part: QuantSpec) -> dict[str, Any]:
    """In the words of compressed-tensors' QuantizationArgs, and "token_group" beside them."""
    size = None
    match part.granularity:
        case Group(size):
            strategy = "group"
        case TokenGroup(size):
            strategy = "token_group"
        case granularity:
            strategy = next(name for name, g in _STRATEGIES.items() if g == granularity)
    return {
        "num_bits": part.num_bits,
        "type": part.type,
        "symmetric": part.symmetric,
        "dynamic": part.dynamic,
        "strategy": strategy,
        "group_size": size,
    }


def _part_from_dict(args: dict[str, Any]) -> QuantSpec:
    strategy = args.get("strategy") or "tensor"
    granularity: Granularity
    if strategy in _SIZED:
        granularity = _SIZED[strategy](int(args["group_size"]))
    elif strategy in _STRATEGIES:
        granularity = _STRATEGIES[strategy]
    else:
        known = ", ".join([*_STRATEGIES, *_SIZED])
        raise UserError(f"the cache's strategy '{strategy}' is not supported (known: {known})")
    return QuantSpec(
        int(args["num_bits"]),
        args.get("type", "int"),
        granularity,
        bool(args.get("symmetric", True)),
        bool(args.get("dynamic", False)),
    )
