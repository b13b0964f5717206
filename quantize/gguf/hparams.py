"""A model's hyperparameters: out of config.json or GGUF keys, and into either.

Only what llama.cpp's graph of the architecture computes is accepted; anything else in a config that
changes the function (another activation, other windows, a rope variant) is refused, since the file
would run and be wrong. A sliding window that llama.cpp does not have is a warning: up to its length
both compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...kernels.errors import UserError
from . import rope as ropes
from .architecture import Architecture, Setting
from .architectures import architecture_of_class, architecture_of_file
from .rope import Rope, shortest

ALIASES = {"num_experts": "num_local_experts"}  # versions of transformers differ
LARGEST = 1 << 31  # of any size in a config or a file


@dataclass(frozen=True)
class Hyperparameters:
    """`values`: setting -> number, by the names in architecture.py, `vocab_size` and `head_dim`
    among them. `tied`: whether the output is the embedding. `written`: the optional settings that
    are written to a file. `warnings`: what llama.cpp computes otherwise."""

    architecture: Architecture
    values: Mapping[str, Any]
    tied: bool
    rope: Rope = field(default_factory=Rope)
    written: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        heads, kv_heads = self["num_attention_heads"], self["num_key_value_heads"]
        head_dim = self["head_dim"]
        if heads % kv_heads or (head_dim % 2 and self.architecture.ropes):
            raise UserError(
                f"{heads} heads of {head_dim} with {kv_heads} key-value heads is no "
                f"{self.architecture.name}"
            )
        if not self.architecture.own_head_dim and head_dim * heads != self["hidden_size"]:
            raise UserError(
                f"{heads} heads of {head_dim} do not make {self['hidden_size']}: llama.cpp's "
                f"{self.architecture.name} knows no other head_dim than hidden_size / heads"
            )

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def dimensions(self) -> dict[str, int]:
        """Sizes by the names that slots use for them."""
        v = self.values
        q, kv = (v[f"num_{n}_heads"] * v["head_dim"] for n in ("attention", "key_value"))
        return {
            "one": 1,
            "vocab": v["vocab_size"],
            "positions": v["max_position_embeddings"],
            "hidden": v["hidden_size"],
            "head": v["head_dim"],
            "q": q,
            "kv": kv,
            "qkv": q + 2 * kv,
            "ffn": v["intermediate_size"],
            "two_ffn": 2 * v["intermediate_size"],
            "experts": v.get("num_experts", 0),
            "expert_ffn": v.get("moe_intermediate_size", 0),
            "shared_ffn": v.get("shared_expert_intermediate_size", 0),
        }

    def rope_tensors(self) -> dict[str, Tensor]:
        """The file's tensors that come from no module, by name."""
        return ropes.tensors(self.rope, self["head_dim"])


def from_config(config: Mapping[str, Any]) -> Hyperparameters:
    """Hyperparameters of a config.json; UserError for what llama.cpp does not compute."""
    architecture = architecture_of_class((config.get("architectures") or ["none"])[0])
    _check_fixed(config, architecture)
    values, written = _settings_from_config(config, architecture)
    _check_attention(config, values, architecture)
    return Hyperparameters(
        architecture,
        values,
        tied=bool(config.get("tie_word_embeddings", architecture.name == "gpt2")),
        rope=ropes.from_config(config, architecture),
        written=written,
        warnings=_warnings(config, architecture),
    )


def _settings_from_config(
    config: Mapping[str, Any], architecture: Architecture
) -> tuple[dict[str, Any], frozenset[str]]:
    values: dict[str, Any] = {}
    written = set()
    for setting in architecture.settings:
        name = architecture.config_name(setting.name)
        value = config.get(name)
        if value is None and setting.name in ALIASES:
            value = config.get(ALIASES[setting.name])
        if value is None and setting.name in ("num_key_value_heads", "intermediate_size"):
            value = _usual(setting.name, config, architecture)
        if value is None:
            value = architecture.defaults.get(setting.name)
        if value is not None:
            values[setting.name] = _checked(name, value, setting.kind)
            written.add(setting.name)
        elif not setting.optional:
            raise UserError(f"config.json lacks '{name}'")
    values["vocab_size"] = _checked("vocab_size", config.get("vocab_size"), int)
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    own = config.get("head_dim")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    values["head_dim"] = hidden // heads if own is None else _checked("head_dim", own, int)
    return values, frozenset(written)


def _usual(name: str, config: Mapping[str, Any], architecture: Architecture) -> Any:
    """What a model without the setting has."""
    if name == "num_key_value_heads":
        return config.get(architecture.config_name("num_attention_heads"))
    hidden = config.get(architecture.config_name("hidden_size"))
    return 4 * hidden if architecture.name == "gpt2" and isinstance(hidden, int) else None


def _checked(name: str, value: Any, kind: type[int] | type[float]) -> Any:
    """`value` as a number of `kind`; a window may be 0."""
    lowest = 0 if name == "sliding_window" else 1
    right = isinstance(value, int) and lowest <= value < LARGEST
    if kind is float:
        right = isinstance(value, int | float) and 0 < value < float("inf")
    if not right or isinstance(value, bool):
        raise UserError(f"config.json: {name} must be a positive number, got {value!r}")
    return kind(value)


def _check_fixed(config: Mapping[str, Any], architecture: Architecture) -> None:
    for name, only in architecture.fixed.items():
        value = config.get(name, only)
        if value != only:
            raise UserError(
                f"{name} is {value!r}: llama.cpp's {architecture.name} computes {only!r} only"
            )


def _check_attention(
    config: Mapping[str, Any], values: Mapping[str, Any], architecture: Architecture
) -> None:
    """UserError where windows or the scale of queries are other than llama.cpp takes them to be."""
    layers, period = values["num_hidden_layers"], architecture.window_period
    if period and config.get("layer_types") is not None:
        expected = window_layers(layers, period)
        if list(config["layer_types"]) != expected:
            raise UserError(
                f"layer_types are not a full_attention every {period} layers, which llama.cpp's "
                f"{architecture.name} computes"
            )
    if config.get("use_bidirectional_attention"):
        raise UserError("use_bidirectional_attention is set: an encoder is not converted")
    if architecture.big_layers:
        scale = values["head_dim"]
        if layers == architecture.big_layers:
            scale = values["hidden_size"] // values["num_attention_heads"]
        given = config.get("query_pre_attn_scalar", scale)
        if given != scale:
            raise UserError(
                f"query_pre_attn_scalar is {given!r}: llama.cpp's {architecture.name} of {layers} "
                f"layers takes it to be {scale}"
            )


def window_layers(layers: int, period: int) -> list[str]:
    """config.json's layer_types where every `period`th layer attends to everything."""
    return [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)
    ]


def _warnings(config: Mapping[str, Any], architecture: Architecture) -> tuple[str, ...]:
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", True)
    context = config.get("max_position_embeddings", 0)
    if architecture.window or not window or not used or window >= context:
        return ()
    return (
        f"llama.cpp's {architecture.name} attends to everything: texts longer than the model's "
        f"sliding window of {window} tokens are computed otherwise than by the model",
    )


def to_config(h: Hyperparameters) -> dict[str, Any]:
    """A config.json for the architecture's first class, without token ids and dtype."""
    a = h.architecture
    names = {s.name for s in a.settings if not s.optional} | {"vocab_size"} | h.written
    config: dict[str, Any] = {
        "architectures": [a.classes[0]],
        "model_type": a.model_type,
        **{a.config_name(n): v for n, v in h.values.items() if n in names},
        **a.fixed,
        **ropes.to_config(h.rope, a),
        "tie_word_embeddings": h.tied,
    }
    if a.window_period:
        config["layer_types"] = window_layers(h["num_hidden_layers"], a.window_period)
    if a.big_layers:
        big = h["num_hidden_layers"] == a.big_layers
        whole = h["hidden_size"] // h["num_attention_heads"]
        config["query_pre_attn_scalar"] = whole if big else h["head_dim"]
    if not a.window or not h.values.get("sliding_window"):
        config["sliding_window"] = h.values.get("sliding_window") or None
    return config


def to_keys(h: Hyperparameters) -> dict[str, Any]:
    """The architecture's keys: an int is a uint32 in the file, a float a float32."""
    a = h.architecture
    keys = {s.key: s.kind(h[s.name]) for s in a.settings if not s.optional or s.name in h.written}
    original = h.values.get("original_max_position_embeddings")
    keys |= ropes.to_keys(h.rope, a, h["head_dim"], h["max_position_embeddings"], original)
    return {f"{a.name}.{key}": value for key, value in keys.items()}


def from_keys(
    keys: Mapping[str, Any], vocab_size: int, tied: bool, stored_ropes: Mapping[str, Tensor]
) -> Hyperparameters:
    """Hyperparameters of a GGUF's metadata; stored_ropes: its tensors named in rope.TENSORS."""
    name = keys.get("general.architecture")
    architecture = architecture_of_file(name, bool(keys.get(f"{name}.expert_count")))
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in keys.items()
        if key.startswith(f"{name}.")
    }
    values: dict[str, Any] = {}
    written = set()
    for setting in architecture.settings:
        if setting.key not in own and (setting.optional or setting.name == "vocab_size"):
            continue
        default = own.get("attention.head_count") if "head_count_kv" in setting.key else None
        default = architecture.defaults.get(setting.name, default)
        value = _number(own, name, setting, default)
        value = shortest(value) if setting.kind is float else value
        if values.setdefault(setting.name, value) != value:
            raise UserError(
                f"the GGUF file has {name}.{setting.key} = {value!r}, but "
                f"{values[setting.name]!r} under another key of {setting.name}"
            )
        written.add(setting.name)
    values["vocab_size"] = vocab_size
    heads = values["num_attention_heads"]
    values.setdefault("num_key_value_heads", heads)
    values.setdefault("head_dim", values["hidden_size"] // heads)
    _check_unread(own, architecture)
    rope = ropes.from_keys(own, architecture, values["head_dim"], stored_ropes)
    return Hyperparameters(architecture, values, tied, rope, frozenset(written))


def _number(own: Mapping[str, Any], name: Any, setting: Setting, default: Any) -> Any:
    """The number stored for `setting`, which is positive; a window may be 0."""
    key = setting.key
    value = own.get(key, default)
    if value is None:
        raise UserError(f"the GGUF file lacks the key '{name}.{key}'")
    lowest = 0 if key == "attention.sliding_window" else 1e-30
    kinds = (int,) if setting.kind is int else (int, float)
    if type(value) not in kinds or not lowest <= value < float("inf"):
        raise UserError(f"the GGUF file has {name}.{key} = {value!r}, which is no positive number")
    if value >= LARGEST and isinstance(value, int):
        raise UserError(f"the GGUF file has {name}.{key} = {value!r}, which no model has")
    return value


def _check_unread(own: Mapping[str, Any], architecture: Architecture) -> None:
    """UserError for keys that change the function and that config.json has no word for."""
    if own.get("expert_count") and not any(s.key == "expert_count" for s in architecture.settings):
        raise UserError(
            f"the GGUF file is a {architecture.name} with experts, which import does not know"
        )
    if own.get("attention.sliding_window") and architecture.name == "olmo2":
        raise UserError("the GGUF file is an OLMo 3 (sliding window), which import does not know")
