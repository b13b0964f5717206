"""How one layer stores its keys and values: the spec in the terms of kernels/kv_quant.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.errors import UserError
from ..kernels.kv_quant import KVFormat, fake_quantize_kv
from ..quantize.checkpoint.kv_config import KVScales, KVStorage
from ..quantize.kv_names import kv_spec_from_name
from ..quantize.spec import Group, Head, QuantSpec, TensorWise, Token, TokenGroup
from .rope import Rope

ROTATED_CLIPS = {2: 0.8, 4: 0.95}
"""Bits -> share of its range that a rotated head's codes span, where less was measured to be better
(docs/methods.md)."""
NONE_STORED = KVScales(None, None)
_NO_SCALES = (
    "static scales of the KV cache are calibrated and stored by quantize run --kv; choose a "
    "dynamic format (int8, fp8_dynamic, int4) to go without"
)


@dataclass(frozen=True)
class LayerKV:
    """A layer's formats (None: as computed) and calibrated scales."""

    key: KVFormat | None
    value: KVFormat | None
    scales: KVScales
    key_before_rope: bool

    def fake_quantize(
        self, keys: Tensor, values: Tensor, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        """Both [batch, heads, tokens, head_dim] as they come back from a cache that held nothing
        before them, in their dtypes. rope: of these keys, where they are stored as before it."""
        if self.key is not None and self.key_before_rope and rope is not None:
            before = rope.turn_back(keys).to(keys.dtype)
            keys = rope.turn(fake_quantize_kv(before, self.key)).to(keys.dtype)
        elif self.key is not None:
            keys = fake_quantize_kv(keys, self.key, self.scales.key)
        if self.value is not None:
            values = fake_quantize_kv(values, self.value, self.scales.value)
        return keys, values


def layer_kv(storage: KVStorage, layer: int, keys: Tensor, values: Tensor) -> LayerKV | None:
    """How `layer` stores such keys and values [batch, heads, tokens, head_dim]; None: as they are.

    Raises UserError when groups do not divide a head or calibrated scales do not fit.
    """
    spec = storage.spec
    if layer in spec.skip_layers:
        return None
    stored = storage.scales.get(layer, NONE_STORED)
    scales = KVScales(*(None if scale is None else scale.to(keys.device) for scale in stored))
    for name, part, scale, x in (
        ("k_scale", spec.key, scales.key, keys),
        ("v_scale", spec.value, scales.value, values),
    ):
        if part is not None and not part.dynamic:
            _check_scale(f"{name} of layer {layer}", part, scale, x.shape[1])
    return LayerKV(
        spec.key and kv_format(spec.key, spec.rotate_key, keys.shape[3]),
        spec.value and kv_format(spec.value, spec.rotate_value, values.shape[3]),
        scales,
        spec.key_before_rope,
    )


def kv_format(part: QuantSpec, rotate: bool, head_dim: int) -> KVFormat:
    """How keys or values of heads of `head_dim` channels are stored."""
    match part.granularity:
        case Token():
            axis, group = "channels", head_dim
        case Group(group):
            axis = "channels"
            if head_dim % group:
                raise UserError(
                    f"groups of {group} channels do not divide a head of {head_dim}; choose a size "
                    "that does, or one scale a token"
                )
        case TokenGroup(group):
            axis = "tokens"
        case TensorWise() | Head():
            axis, group = "static", 0
        case other:
            raise AssertionError(other)
    clip = ROTATED_CLIPS.get(part.num_bits, 1.0) if rotate and not part.symmetric else 1.0
    return KVFormat(part.type, part.num_bits, part.symmetric, axis, group, clip, rotate)


def resolve_kv(name: str, stored: KVStorage | None, config: Any) -> KVStorage | None:
    """How a cache of the model of `config` is stored; None: in the model's dtype.

    name: of a format, "model", or "auto" for `stored`, which is what the checkpoint says. Raises
    UserError for names unknown and formats that do not suit the model.
    """
    if name == "model":
        return None
    if name != "auto":
        stored = KVStorage(kv_spec_from_name(name), stored.scales if stored else {})
    if stored is None:
        return None
    layers = config.get_text_config(decoder=True).num_hidden_layers
    beyond = [layer for layer in stored.spec.skip_layers if layer >= layers]
    if beyond:
        raise UserError(
            f"the KV format skips layer {beyond[0]}, but the model's layers are 0 to {layers - 1}"
        )
    if stored.spec.is_static and not stored.scales:
        raise UserError(_NO_SCALES)
    return stored


def _check_scale(name: str, part: QuantSpec, scale: Tensor | None, heads: int) -> None:
    expected = heads if isinstance(part.granularity, Head) else 1
    if scale is None:
        raise UserError(f"there is no {name}: {_NO_SCALES}")
    if scale.numel() != expected:
        raise UserError(f"{name} holds {scale.numel()} numbers, but its format takes {expected}")
