"""A Llama's hyperparameters: out of config.json or GGUF keys, and into either.

Only what llama.cpp's `llama` architecture computes is accepted; anything else in a config that
changes the function (another activation, a sliding window, a rope variant) is refused, since the
file would run and be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels.errors import UserError
from .names import llama3_divisors

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
LLAMA3_KEYS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
SCALING_KEYS: dict[str, tuple[str, type]] = {
    "factor": ("llama.rope.scaling.factor", float),
    "original_max_position_embeddings": ("llama.rope.scaling.original_context_length", int),
    "beta_fast": ("llama.rope.scaling.yarn_beta_fast", float),
    "beta_slow": ("llama.rope.scaling.yarn_beta_slow", float),
}


@dataclass(frozen=True)
class Hyperparameters:
    """Hugging Face's names. `rope`: {"rope_type": default|linear|llama3|yarn, and its numbers}."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise UserError(
                f"{self.num_attention_heads} heads of {self.head_dim} with "
                f"{self.num_key_value_heads} key-value heads is no Llama"
            )

    def rope_divisors(self) -> Tensor | None:
        """The rope_freqs tensor float32 [head_dim // 2], None unless the rope type is llama3."""
        if self.rope["rope_type"] != "llama3":
            return None
        return llama3_divisors(self.head_dim, self.rope_theta, *(self.rope[k] for k in LLAMA3_KEYS))

    def shapes(self) -> dict[str, tuple[int, int] | tuple[int]]:
        """Shape of the weight of every module, by Hugging Face module name."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        inner: dict[str, tuple[int, int] | tuple[int]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        shapes: dict[str, tuple[int, int] | tuple[int]] = {
            "model.embed_tokens": (self.vocab_size, hidden)
        }
        for i in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in inner.items()}
        shapes["model.norm"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        return shapes


def from_config(config: dict[str, Any]) -> Hyperparameters:
    """Hyperparameters of a config.json; UserError for what llama.cpp's `llama` does not compute."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"GGUF export knows the architectures {', '.join(ARCHITECTURES)}; "
            f"this model is a {architecture}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act '{config['hidden_act']}': llama.cpp's llama has silu only")
    if config.get("sliding_window"):
        raise UserError("sliding_window is set: llama.cpp's llama attends to everything")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    for key in SIZES:
        if not isinstance(config.get(key, 1), int) or config.get(key, 1) < 1:
            raise UserError(f"config.json: {key} must be a positive number, got {config[key]!r}")
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Hyperparameters(
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            rope=_checked_rope(rope),
        )
    except KeyError as e:
        raise UserError(f"config.json lacks {e}") from e


def _checked_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope` when llama.cpp computes it."""
    needed: dict[str, set[str]] = {
        "default": set(),
        "linear": {"factor"},
        "llama3": set(LLAMA3_KEYS),
        "yarn": {"factor", "original_max_position_embeddings"},
    }
    kind = rope["rope_type"]
    if kind not in needed:
        raise UserError(f"rope type '{kind}' is not converted; known: {', '.join(needed)}")
    if missing := needed[kind] - rope.keys():
        raise UserError(f"rope type '{kind}' lacks {', '.join(sorted(missing))}")
    extra = {k for k, v in rope.items() if v} - SCALING_KEYS.keys() - {"rope_type"}
    if kind == "yarn" and extra:
        raise UserError(f"yarn with {', '.join(sorted(extra))} is not converted")
    return rope


def to_config(h: Hyperparameters) -> dict[str, Any]:
    """A config.json for LlamaForCausalLM, without token ids and dtype."""
    rope = {**h.rope, "rope_theta": h.rope_theta}
    plain = h.rope["rope_type"] == "default"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": h.vocab_size,
        "hidden_size": h.hidden_size,
        "intermediate_size": h.intermediate_size,
        "num_hidden_layers": h.num_hidden_layers,
        "num_attention_heads": h.num_attention_heads,
        "num_key_value_heads": h.num_key_value_heads,
        "head_dim": h.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": h.max_position_embeddings,
        "rms_norm_eps": h.rms_norm_eps,
        "rope_theta": h.rope_theta,
        "rope_scaling": None if plain else h.rope,
        "rope_parameters": rope,
        "tie_word_embeddings": h.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def to_keys(h: Hyperparameters) -> dict[str, Any]:
    """The llama.* keys of `h`: an int is a uint32 in the file, a float a float32."""
    keys: dict[str, Any] = {
        "llama.vocab_size": h.vocab_size,
        "llama.context_length": h.max_position_embeddings,
        "llama.embedding_length": h.hidden_size,
        "llama.block_count": h.num_hidden_layers,
        "llama.feed_forward_length": h.intermediate_size,
        "llama.attention.head_count": h.num_attention_heads,
        "llama.attention.head_count_kv": h.num_key_value_heads,
        "llama.attention.key_length": h.head_dim,
        "llama.attention.value_length": h.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(h.rms_norm_eps),
        "llama.rope.freq_base": float(h.rope_theta),
        "llama.rope.dimension_count": h.head_dim,
    }
    if h.rope["rope_type"] in ("linear", "yarn"):
        keys["llama.rope.scaling.type"] = h.rope["rope_type"]
        for name, (key, kind) in SCALING_KEYS.items():
            if h.rope.get(name):
                keys[key] = kind(h.rope[name])
    return keys


def from_keys(
    keys: dict[str, Any], vocab_size: int, tied: bool, divisors: Tensor | None
) -> Hyperparameters:
    """Hyperparameters of a GGUF's metadata; `divisors`: its rope_freqs tensor, if it has one."""
    architecture = keys.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"GGUF import knows the architecture llama; this file is a {architecture}")
    heads = _number(keys, "llama.attention.head_count")
    hidden = _number(keys, "llama.embedding_length")
    head_dim = _number(keys, "llama.attention.key_length", hidden // heads)
    h = Hyperparameters(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_number(keys, "llama.feed_forward_length"),
        num_hidden_layers=_number(keys, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_number(keys, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=_number(keys, "llama.context_length"),
        rms_norm_eps=shortest(_number(keys, "llama.attention.layer_norm_rms_epsilon")),
        rope_theta=shortest(_number(keys, "llama.rope.freq_base", 10000.0)),
        tie_word_embeddings=tied,
        rope=_rope_from_keys(keys, head_dim, divisors),
    )
    if keys.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UserError("the GGUF file rotates a part of each head only, which no Llama does")
    if keys.get("llama.expert_count", 0):
        raise UserError("the GGUF file is a mixture of experts; import knows dense Llamas")
    return h


def _number(keys: dict[str, Any], key: str, default: Any = None) -> Any:
    """The positive number stored under `key`."""
    value = keys.get(key, default)
    if value is None:
        raise UserError(f"the GGUF file lacks the key '{key}'")
    if not isinstance(value, int | float) or not value > 0:
        raise UserError(f"the GGUF file has {key} = {value!r}, which is no positive number")
    return value


def _rope_from_keys(keys: dict[str, Any], head_dim: int, divisors: Tensor | None) -> dict[str, Any]:
    """The rope dict; UserError for a scaling that config.json cannot say."""
    kind = keys.get("llama.rope.scaling.type", "none")
    if divisors is not None:
        return _llama3_from_divisors(divisors, keys.get("llama.rope.freq_base", 10000.0), head_dim)
    if kind == "none":
        return {"rope_type": "default"}
    rope = {"rope_type": kind}
    rope |= {name: keys[key] for name, (key, _) in SCALING_KEYS.items() if key in keys}
    return _checked_rope(rope)


def _llama3_from_divisors(divisors: Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope numbers, of which a GGUF file holds only the resulting divisors.

    The largest one is the factor; an entry between 1 and the factor gives the original context,
    low and high being 1 and 4 in every published model. The divisors are computed back to be sure.
    """
    low, high, factor = 1.0, 4.0, float(divisors.max())
    foreign = UserError("the GGUF file's rope_freqs are not Llama 3's: cannot name its scaling")
    if not 1 < factor < float("inf"):
        raise foreign
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    blend = (1 / divisors.double() - 1 / factor) / (1 - 1 / factor)
    middle = (blend - 0.5).abs().argmin()
    turns = blend[middle] * (high - low) + low
    original = round((2 * torch.pi * turns / frequency[middle]).item())
    ours = llama3_divisors(head_dim, theta, factor, low, high, original)
    if ours.shape != divisors.shape or not torch.allclose(ours, divisors, rtol=1e-4):
        raise foreign
    return {"rope_type": "llama3"} | dict(
        zip(LLAMA3_KEYS, (factor, low, high, original), strict=True)
    )


def shortest(x: float) -> float:
    """The decimal number that a float32 stands for: 1e-05 instead of 9.999999747378752e-06."""
    return float(f"{x:.7g}")
