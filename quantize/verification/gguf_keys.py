"""The numbers in a GGUF file's keys: by themselves, against each other, and against the tensors.

Of an architecture that lowbit knows, the tensors have to be those that its numbers mean; of another
one the numbers alone are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...kernels.errors import UserError
from ..gguf import rope
from ..gguf.container import Container
from ..gguf.hparams import LARGEST, Hyperparameters
from ..gguf.names import targets
from ..gguf.reader import GGUFFile
from ..gguf.to_hf import read_hyperparameters
from .findings import Finding, finding

NEEDED = (
    "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count",
)  # fmt: skip
SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count", "expert_count",
         "expert_used_count", "vocab_size")  # fmt: skip
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
BASES = ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor")
MOST_LAYERS = 4096


def examine_keys(container: Container) -> Iterator[Finding]:
    """Keys of the architecture that are missing or hold what no model has."""
    keys = container.keys
    name = keys["general.architecture"]
    for key in (*NEEDED, "attention.head_count_kv", *SIZES):
        value = keys.get(f"{name}.{key}")
        if value is None and key not in NEEDED:
            continue
        numbers = value if isinstance(value, list) else [value]
        lowest = 1 if key in NEEDED[:3] or key == NEEDED[4] and len(numbers) == 1 else 0
        if not numbers or not all(type(n) is int and lowest <= n < LARGEST for n in numbers):
            expected = f"a number from {lowest} to {LARGEST - 1:,}"
            yield finding("GGUF key", f"{name}.{key}", expected, value)
    layers = keys.get(f"{name}.block_count")
    if type(layers) is int and layers > MOST_LAYERS:
        yield finding("GGUF key", f"{name}.block_count", f"at most {MOST_LAYERS}", layers)
    yield from _floats(name, keys)
    yield from _heads(name, keys)


def _floats(name: str, keys: dict[str, Any]) -> Iterator[Finding]:
    for key, value in keys.items():
        numbers = value if isinstance(value, list) else [value]
        reals = [n for n in numbers if type(n) is float] if key.startswith(f"{name}.") else []
        leaf = key.removeprefix(f"{name}.")
        if not all(map(math.isfinite, reals)):
            yield finding("GGUF key", key, "finite numbers", value)
        elif leaf in EPSILONS and not all(0 < n < 1 for n in reals):
            yield finding("GGUF key", key, "a number between 0 and 1", value)
        elif leaf in BASES and not all(n > 0 for n in reals):
            yield finding("GGUF key", key, "a positive number", value)


def _heads(name: str, keys: dict[str, Any]) -> Iterator[Finding]:
    """Heads against key-value heads and, where their size follows from it, the hidden size."""
    heads, kv_heads = (keys.get(f"{name}.attention.head_count{s}") for s in ("", "_kv"))
    hidden = keys.get(f"{name}.embedding_length")
    if type(heads) is not int or heads < 1:
        return  # one for each layer, or told before
    if type(kv_heads) is int and kv_heads > 0 and heads % kv_heads:
        where = f"{name}.attention.head_count_kv"
        yield finding("GGUF key", where, f"a divisor of {heads} heads", kv_heads)
    own = f"{name}.attention.key_length" in keys
    if not own and type(hidden) is int and hidden % heads:
        where = f"{name}.attention.head_count"
        yield finding("GGUF key", where, f"a divisor of {hidden}, the hidden size", heads)


def examine_import(path: Path, container: Container) -> Iterator[Finding]:
    """The tensors against the numbers, where lowbit knows the architecture; and what keeps lowbit
    from importing a file that llama.cpp may run."""
    try:
        h = read_hyperparameters(GGUFFile(path))
    except UserError as e:
        yield finding("GGUF import", path.name, "a model that lowbit imports", e)
        return
    yield from _tensors(h, container)


def _tensors(h: Hyperparameters, container: Container) -> Iterator[Finding]:
    unknown = container.tensors.keys() - set(rope.TENSORS)
    for target in targets(h):
        unknown.discard(target.name)
        stored = container.tensors.get(target.name)
        if stored is None and target.part == "weight":
            expected = f"shape {target.shape}"
            yield finding("GGUF tensor missing", target.name, expected, "no such tensor")
        elif stored is not None and stored.shape not in (target.shape, target.shape[1:]):
            expected = f"{target.shape}, by the file's keys"
            yield finding("GGUF shape", target.name, expected, stored.shape)
    if unknown:
        expected = f"tensors of {h.architecture.name}"
        yield finding("GGUF import", min(unknown), expected, f"{len(unknown)} of another kind")
