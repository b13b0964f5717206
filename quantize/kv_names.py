"""Formats of the KV cache by name: int8, fp8, int4, k4v2, int4_token_g32, ...

A name is a width, then options, each after an underscore. Widths: `int2` to `int8`, `fp8` (E4M3),
or `k<bits>v<bits>` (int; 16: as computed). Options: see OPTIONS. What a width means without options
was chosen by measurement (docs/methods.md); `fp8` is vLLM's, with calibrated scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ..kernels.errors import UserError
from .spec import Group, Head, KVSpec, QuantSpec, TensorWise, Token, TokenGroup

TOKENS_A_GROUP = 32
OPTIONS = {
    "static": "8 bits: one calibrated scale for all keys of a layer, one for its values",
    "head": "8 bits: calibrated scales, one for each head",
    "channel": "keys by channel over groups of tokens, as before their rotary embedding",
    "postrope": "keys by channel over groups of tokens, after their rotary embedding",
    "hadamard": "keys and values Hadamard-rotated, a scale for each token and head",
    "token": "a scale for each token and head, not rotated",
    "sym": "symmetric codes, without offsets",
    "g<n>": "n channels of a token, or tokens of a channel, share a scale",
}
_NAME = re.compile(
    r"(?:int(?P<both>\d+)|(?P<fp8>fp8)|k(?P<k>\d+)v(?P<v>\d+))(?P<options>(?:_\w+)?)"
)
_ALIASES = {
    "fp8_dynamic": "fp8_token",
    "fp8_e4m3": "fp8",  # from here on vLLM's names
    "fp8_per_token_head": "fp8_token",
    "int8_per_token_head": "int8",
}


def kv_spec_from_name(name: str, skip_layers: tuple[int, ...] = ()) -> KVSpec:
    """The format `name`, not used in `skip_layers`. UserError says what can stand in a name."""
    lowered = name.lower()
    match = _NAME.fullmatch(_ALIASES.get(lowered, lowered))
    if match is None:
        raise UserError(
            f"unknown KV format '{name}': it is int2 to int8, fp8 or k<bits>v<bits>, and options "
            f"({', '.join(OPTIONS)}), each after an underscore, such as int8, k4v2, int4_hadamard"
        )
    spec = _of_widths(match)
    for option in match["options"].split("_")[1:]:
        try:
            spec = _apply(option, spec)
        except UserError as e:
            raise UserError(f"KV format '{name}': {e}") from e
    return replace(spec, skip_layers=skip_layers)


def _of_widths(match: re.Match[str]) -> KVSpec:
    if match["fp8"]:
        static = QuantSpec(8, "float", TensorWise())
        return KVSpec(static, static)
    key, value = (int(match[side] or match["both"]) for side in ("k", "v"))
    spec = KVSpec(
        None if key == 16 else QuantSpec(key, granularity=Token(), dynamic=True),
        None if value == 16 else QuantSpec(value, granularity=Token(), dynamic=True),
    )
    if spec.key is not None and key < 8:
        spec = _by_channel(spec, before_rope=True)
    if spec.value is not None and value < 8:
        part = replace(spec.value, symmetric=False)
        spec = replace(spec, value=part, rotate_value=True)
    return spec


def _apply(option: str, spec: KVSpec) -> KVSpec:
    """`spec` with `option`."""
    if option in _CHANGES:
        return _CHANGES[option](spec)
    size = re.fullmatch(r"g(\d+)", option)
    if size is None:
        raise UserError(f"unknown option '{option}' (known: {', '.join(OPTIONS)})")
    return _each(spec, lambda part: _with_group(part, int(size[1])))


def _with_group(part: QuantSpec, size: int) -> QuantSpec:
    match part.granularity:
        case TokenGroup():
            return replace(part, granularity=TokenGroup(size))
        case Token() | Group():
            return replace(part, granularity=Group(size))
    raise UserError("static scales have no groups")


def _by_channel(spec: KVSpec, before_rope: bool) -> KVSpec:
    if spec.key is None:
        raise UserError("the keys stay as they are; they have no channels' scales")
    key = replace(spec.key, granularity=TokenGroup(TOKENS_A_GROUP), symmetric=False, dynamic=True)
    return replace(spec, key=key, rotate_key=False, key_before_rope=before_rope)


def _by_token(spec: KVSpec, rotate: bool) -> KVSpec:
    spec = replace(spec, rotate_key=False, rotate_value=rotate, key_before_rope=False)
    spec = _each(spec, lambda part: replace(part, granularity=Token(), dynamic=True))
    return replace(spec, rotate_key=rotate)


def _static(spec: KVSpec, granularity: TensorWise | Head) -> KVSpec:
    if any(part is not None and part.num_bits != 8 for part in (spec.key, spec.value)):
        raise UserError("static scales are for 8 bits")
    return _each(spec, lambda part: replace(part, granularity=granularity, dynamic=False))


def _symmetric(part: QuantSpec) -> QuantSpec:
    return replace(part, symmetric=True)


def _each(spec: KVSpec, change: Callable[[QuantSpec], QuantSpec]) -> KVSpec:
    return replace(spec, key=spec.key and change(spec.key), value=spec.value and change(spec.value))


_CHANGES: dict[str, Callable[[KVSpec], KVSpec]] = {
    "static": lambda spec: _static(spec, TensorWise()),
    "head": lambda spec: _static(spec, Head()),
    "channel": lambda spec: _by_channel(spec, before_rope=True),
    "postrope": lambda spec: _by_channel(spec, before_rope=False),
    "hadamard": lambda spec: _by_token(spec, rotate=True),
    "token": lambda spec: _by_token(spec, rotate=False),
    "sym": lambda spec: _each(spec, _symmetric),
}


def describe_kv(spec: KVSpec) -> str:
    """`spec` in words: "K int4 by channel of 32 tokens, before RoPE; V int4 by token, rotated"."""
    keys = _describe(spec.key, spec.rotate_key)
    if spec.key_before_rope:
        keys += ", before RoPE"
    skipped = f"; not in layers {', '.join(map(str, spec.skip_layers))}" if spec.skip_layers else ""
    return f"K {keys}; V {_describe(spec.value, spec.rotate_value)}{skipped}"


def _describe(part: QuantSpec | None, rotated: bool) -> str:
    if part is None:
        return "as computed"
    match part.granularity:
        case Token():
            shared = "by token"
        case Group(size):
            shared = f"by token in groups of {size}"
        case TokenGroup(size):
            shared = f"by channel of {size} tokens"
        case Head():
            shared = "by head, static"
        case _:
            shared = "static"
    width = f"int{part.num_bits}" if part.type == "int" else "fp8"
    return f"{width} {shared}" + (", rotated" if rotated else "")
