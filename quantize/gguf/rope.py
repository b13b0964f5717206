"""Rotary position embeddings: config.json's rope_parameters, GGUF's keys and tensors, either way.

Linear and yarn scaling are keys. Llama 3's stretched frequencies become a tensor of divisors, the
long and short factors of longrope two. What config.json can say and llama.cpp does not compute is
refused, since the file would run and be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels.errors import UserError
from .architecture import Architecture

FREQS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (FREQS, LONG, SHORT)
LLAMA3_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
SCALING_KEYS: dict[str, tuple[str, type[int] | type[float]]] = {
    "factor": ("rope.scaling.factor", float),
    "original_max_position_embeddings": ("rope.scaling.original_context_length", int),
    "beta_fast": ("rope.scaling.yarn_beta_fast", float),
    "beta_slow": ("rope.scaling.yarn_beta_slow", float),
}
NEEDED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": set(LLAMA3_NUMBERS),
    "yarn": {"factor", "original_max_position_embeddings"},
    "longrope": {"short_factor", "long_factor"},
}
ALLOWED = {*SCALING_KEYS, "rope_type"}
EVERYWHERE = {"rope_theta", "partial_rotary_factor", "type"}


@dataclass(frozen=True)
class Rope:
    """`theta`: the base. `scaling`: {"rope_type": ..., and its numbers}. `local_theta`: the base of
    the layers with a sliding window, None where it is the same. `partial`: share of each head that
    is rotated."""

    theta: float = 10000.0
    scaling: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    local_theta: float | None = None
    partial: float = 1.0

    @property
    def kind(self) -> str:
        return self.scaling["rope_type"]


def from_config(config: Mapping[str, Any], architecture: Architecture) -> Rope:
    """The rope of a config.json; UserError when `architecture` does not compute it."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    local: dict[str, Any] = {}
    if "full_attention" in given:
        local = dict(given.get("sliding_attention") or {})
        given = dict(given["full_attention"])
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    scaling = {k: v for k, v in given.items() if k not in EVERYWHERE}
    scaling["rope_type"] = given.get("rope_type", given.get("type", "default"))
    if scaling["rope_type"] == "default":
        scaling = {"rope_type": "default"}
    if scaling["rope_type"] == "longrope":
        scaling = _plain_longrope(scaling, config)
    rope = Rope(
        float(theta),
        scaling,
        float(local["rope_theta"]) if "rope_theta" in local else None,
        float(partial),
    )
    if local.get("rope_type", "default") != "default":
        raise UserError(f"rope type '{local['rope_type']}' of windowed layers is not converted")
    _check(rope, architecture)
    return rope


def _plain_longrope(scaling: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`scaling` without what follows from the numbers of positions."""
    original = scaling.pop("original_max_position_embeddings", None)
    factor = scaling.pop("factor", None)
    original = config.get("original_max_position_embeddings") or original
    context = config.get("max_position_embeddings")
    if factor and original and context and abs(factor - context / original) > 1e-6:
        raise UserError(
            f"longrope's factor is {factor:g}: llama.cpp computes it from {context} and {original} "
            "positions"
        )
    return scaling


def _check(rope: Rope, architecture: Architecture) -> None:
    if not architecture.ropes:
        return
    kind, scaling = rope.kind, rope.scaling
    if kind not in architecture.ropes:
        raise UserError(
            f"rope type '{kind}' is not converted: llama.cpp's {architecture.name} computes "
            f"{', '.join(architecture.ropes)}"
        )
    if missing := NEEDED[kind] - scaling.keys():
        raise UserError(f"rope type '{kind}' lacks {', '.join(sorted(missing))}")
    extra = {k for k, v in scaling.items() if v} - ALLOWED - NEEDED[kind]
    if kind in ("yarn", "longrope") and extra:
        raise UserError(f"{kind} with {', '.join(sorted(extra))} is not converted")
    if rope.partial != 1 and not architecture.partial_rope:
        raise UserError(
            f"{rope.partial:g} of each head is rotated: a {architecture.name} rotates whole heads"
        )
    if not architecture.theta_key and rope.theta != 10000.0:
        raise UserError(
            f"rope_theta is {rope.theta:g}: a file of llama.cpp's {architecture.name} means 10000"
        )


def to_config(rope: Rope, architecture: Architecture) -> dict[str, Any]:
    """The entries of config.json, both as older and as newer versions of transformers read them."""
    if not architecture.ropes:
        return {}
    scaling = dict(rope.scaling)
    entries: dict[str, Any] = {"rope_theta": rope.theta}
    parameters: dict[str, Any] = {**scaling, "rope_theta": rope.theta}
    if rope.partial != 1:
        parameters["partial_rotary_factor"] = entries["partial_rotary_factor"] = rope.partial
    entries["rope_scaling"] = None if rope.kind == "default" else scaling
    entries["rope_parameters"] = parameters
    if rope.local_theta is not None:
        sliding = {"rope_type": "default", "rope_theta": rope.local_theta}
        entries["rope_local_base_freq"] = rope.local_theta
        entries["rope_parameters"] = {"full_attention": parameters, "sliding_attention": sliding}
    return entries


def to_keys(
    rope: Rope, architecture: Architecture, head_dim: int, context: int, original: int | None
) -> dict[str, Any]:
    """The keys below the architecture's name. `context`, `original`: the positions that the model
    takes, and took before they were stretched (longrope)."""
    keys: dict[str, Any] = {}
    if architecture.rope_dimensions:
        keys["rope.dimension_count"] = int(rope.partial * head_dim)
    if not architecture.ropes:
        return keys
    if architecture.theta_key:
        keys["rope.freq_base"] = rope.theta
    if rope.local_theta is not None:
        keys["rope.freq_base_swa"] = rope.local_theta
    if rope.kind in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope.kind
        for name, (key, kind) in SCALING_KEYS.items():
            if rope.scaling.get(name):
                keys[key] = kind(rope.scaling[name])
    if rope.kind == "longrope":
        assert original is not None
        keys["rope.scaling.attn_factor"] = longrope_attention_factor(context, original)
    return keys


def longrope_attention_factor(context: int, original: int) -> float:
    """What longrope multiplies cosines and sines by."""
    if context <= original:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def tensors(rope: Rope, head_dim: int) -> dict[str, Tensor]:
    """The rope tensors of a file by name, float32 [rotated dimensions // 2] each."""
    rotated = int(rope.partial * head_dim)
    if rope.kind == "llama3":
        numbers = (rope.scaling[name] for name in LLAMA3_NUMBERS)
        return {FREQS: llama3_divisors(rotated, rope.theta, *numbers)}
    if rope.kind == "longrope":
        found = {
            LONG: torch.tensor(rope.scaling["long_factor"], dtype=torch.float32),
            SHORT: torch.tensor(rope.scaling["short_factor"], dtype=torch.float32),
        }
        if any(len(factors) != rotated // 2 for factors in found.values()):
            raise UserError(
                f"longrope's factors must be {rotated // 2}, one for each pair of rotated "
                f"dimensions; config.json has {len(found[LONG])} and {len(found[SHORT])}"
            )
        return found
    return {}


def from_keys(
    keys: Mapping[str, Any],
    architecture: Architecture,
    head_dim: int,
    stored: Mapping[str, Tensor],
) -> Rope:
    """The rope of a file. keys: those below the architecture's name; stored: its rope tensors.

    UserError for what config.json cannot say.
    """
    if not architecture.ropes:
        return Rope()
    theta = _base(keys, "rope.freq_base", 10000.0)
    local = _base(keys, "rope.freq_base_swa", None)
    rotated = keys.get("rope.dimension_count", head_dim)
    if not isinstance(rotated, int) or not 0 < rotated <= head_dim or rotated % 2:
        raise UserError(f"the GGUF file rotates {rotated!r} of {head_dim} dimensions of a head")
    rope = Rope(
        theta,
        _scaling_from_keys(keys, rotated, theta, stored),
        local,
        rotated / head_dim,
    )
    _check(rope, architecture)
    return rope


def _base(keys: Mapping[str, Any], key: str, default: float | None) -> Any:
    value = keys.get(key, default)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise UserError(f"the GGUF file has {key} = {value!r}, which is no positive number")
    return shortest(value)


def _scaling_from_keys(
    keys: Mapping[str, Any], rotated: int, theta: float, stored: Mapping[str, Tensor]
) -> dict[str, Any]:
    if FREQS in stored:
        return _llama3_from_divisors(stored[FREQS], theta, rotated)
    if LONG in stored and SHORT in stored:
        factors = {"long_factor": LONG, "short_factor": SHORT}
        lists = {name: [shortest(f) for f in stored[t].tolist()] for name, t in factors.items()}
        return {"rope_type": "longrope", **lists}
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    scaling = {"rope_type": kind}
    return scaling | {n: keys[key] for n, (key, _) in SCALING_KEYS.items() if key in keys}


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
    if divisors.shape != frequency.shape:
        raise foreign
    blend = (1 / divisors.double() - 1 / factor) / (1 - 1 / factor)
    middle = (blend - 0.5).abs().argmin()
    turns = blend[middle] * (high - low) + low
    original = round((2 * torch.pi * turns / frequency[middle]).item())
    ours = llama3_divisors(head_dim, theta, factor, low, high, original)
    if not torch.allclose(ours, divisors, rtol=1e-4):
        raise foreign
    numbers = zip(LLAMA3_NUMBERS, (factor, low, high, original), strict=True)
    return {"rope_type": "llama3"} | dict(numbers)


def llama3_divisors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original_context: int
) -> Tensor:
    """What Llama 3's rope scaling divides each frequency by: float32 [head_dim // 2].

    1 for wavelengths under original_context / high, `factor` above original_context / low, and in
    between the reciprocal of the linear blend (in original_context / wavelength) of both.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = original_context * frequency / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / factor + blend)).to(torch.float32)


def shortest(x: float) -> float:
    """The decimal number that a float32 stands for: 1e-05 instead of 9.999999747378752e-06."""
    return float(f"{x:.7g}")
