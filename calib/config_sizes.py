"""Numbers in a config.json from which no machine can build a model, found before one is tried.

transformers makes a module for every layer and expert that config.json names, one by one, and some
buffers are as long as the context or a head. A config is not trusted, so these numbers are bounded
far above those of any published model. Sizes that every model of its kind needs are also held to be
above zero; others, such as a number of experts, are zero where a model has none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels.errors import UserError
from .safe_files import read_json


class Bound(NamedTuple):
    """The largest number that a key which `pattern` is found in may have."""

    pattern: re.Pattern[str]
    most: int


LAYERS = Bound(re.compile(r"(^|_)(num|n)_(\w+_)?layers?$|^(depth|depths)$"), 1 << 12)
EXPERTS = Bound(re.compile(r"(^|_)(num|n)_(\w+_)?experts?$"), 1 << 14)
SIZES = Bound(re.compile(r"size|dim|head|position|vocab|features|channels|d_model|d_ff"), 1 << 28)
MOST_MODULES = 1 << 20  # layers times experts
POSITIVE = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "d_model", "n_embd", "n_head", "n_layer", "n_positions", "n_ctx", "ffn_dim",
    "num_heads", "num_layers", "word_embed_proj_dim",
}  # fmt: skip
LATENT = "qk_nope_head_dim"  # of latent attention, where head_dim is of the rotated part: 0 if none


def check_sizes(path: Path) -> None:
    """UserError when a number of the config.json `path` is beyond its bound, or not above zero
    where a model needs it to be."""
    largest = {LAYERS: 1, EXPERTS: 1}
    numbers = list(_numbers(read_json(path)))
    latent = any(key == LATENT for key, _ in numbers)
    positive = POSITIVE - {"head_dim"} if latent else POSITIVE
    for key, value in numbers:
        if key in positive and value < 1:
            raise UserError(f"{path} has {key} = {value}, not above 0; it is damaged or no model's")
        for bound in (LAYERS, EXPERTS, SIZES):
            if bound.pattern.search(key.lower()):
                if abs(value) > bound.most:
                    raise UserError(
                        f"{path} has {key} = {value:,}, beyond {bound.most:,}; it is damaged or "
                        "no model's"
                    )
                if bound in largest:
                    largest[bound] = max(largest[bound], value)
                break
    modules = largest[LAYERS] * largest[EXPERTS]
    if modules > MOST_MODULES:
        raise UserError(
            f"{path} has {largest[LAYERS]:,} layers of {largest[EXPERTS]:,} experts, beyond "
            f"{MOST_MODULES:,} in all; it is damaged or no model's"
        )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number below `value` with the nearest key above it."""
    if isinstance(value, dict):
        for inner, v in value.items():
            yield from _numbers(v, inner)
    elif isinstance(value, list):
        for v in value:
            yield from _numbers(v, key)
    elif type(value) is int:
        yield key, value
