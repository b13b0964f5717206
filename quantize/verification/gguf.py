"""A GGUF file, whole or in parts: container, keys, tokenizer, tensors of every layer, blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..gguf.container import Container
from .findings import Finding, finding
from .gguf_attention import examine_attention
from .gguf_blocks import examine_blocks
from .gguf_keys import MOST_LAYERS, examine_import, examine_keys
from .gguf_parts import Parts, read_parts

LAYER = re.compile(r"blk\.(\d+)\.(.+)")
FLOATS = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
QUANTIZATION_VERSION = 2
ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator")
ALIKE = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "phi3", "gemma", "gemma2", "gemma3")
NEARLY = 0.9


def examine_gguf(path: Path) -> tuple[list[Finding], int]:
    """Every fault of the file, or of all parts where it is one of several, and how many tensors it
    has. One tensor's rows are in memory at a time, a few megabytes of them."""
    parts, found = read_parts(path)
    found += _trailing(parts)
    for part, container in parts.containers.items():
        for name, stored in container.tensors.items():
            found += examine_blocks(part, name, stored)
    if parts.complete:
        whole = _joined(parts)
        found += [*_keys(whole), *_tokenizer(whole), *_layers(whole)]
        if is_model(whole) and not any(f.severity == "error" for f in found):
            found += [*examine_import(path, whole), *examine_attention(parts.containers)]
    return found, sum(len(c.tensors) for c in parts.containers.values())


def is_model(container: Container) -> bool:
    """Whether the file is a model's, not an adapter's or an importance matrix."""
    return container.keys.get("general.type", "model") == "model"


def _joined(parts: Parts) -> Container:
    """The keys of the first part with the tensors of all; their places are in their own parts."""
    containers = list(parts.containers.values())
    tensors = {name: t for c in containers for name, t in c.tensors.items()}
    return containers[0]._replace(tensors=tensors)


def _trailing(parts: Parts) -> Iterator[Finding]:
    for path, container in parts.containers.items():
        padded = -(-container.data_end // container.alignment) * container.alignment
        if path.stat().st_size > padded and container.tensors:
            extra = f"{path.stat().st_size - container.data_end:,} bytes after the last tensor"
            yield finding("GGUF trailing bytes", path.name, "the end of the file", extra)


def _keys(container: Container) -> Iterator[Finding]:
    keys = container.keys
    architecture = keys.get("general.architecture")
    if not isinstance(architecture, str):
        yield finding("GGUF key", "general.architecture", "a name", architecture)
        return
    if not is_model(container):
        return
    yield from examine_keys(container)
    quantized = {t.kind for t in container.tensors.values()} - set(FLOATS)
    version = keys.get("general.quantization_version")
    if quantized and version != QUANTIZATION_VERSION:
        where = "general.quantization_version"
        yield finding("GGUF version", where, QUANTIZATION_VERSION, version)


def _tokenizer(container: Container) -> Iterator[Finding]:
    """The vocabulary against itself and against the embedding's rows."""
    keys = container.keys
    model = keys.get("tokenizer.ggml.model")
    where = "tokenizer.ggml.tokens"
    tokens = keys.get(where)
    if model is None and tokens is None:
        if "token_embd.weight" in container.tensors:
            yield finding("GGUF tokenizer", "tokenizer.ggml.model", "a tokenizer", "none")
        return
    if model in ("none", "no_vocab"):
        return
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        yield finding("GGUF tokenizer", where, "a list of texts", tokens)
        return
    embedding = container.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != len(tokens):
        rows = f"{embedding.shape[0]}, the rows of token_embd.weight"
        yield finding("GGUF tokenizer", where, rows, f"{len(tokens)} tokens")
    twice = [t for t, n in Counter(tokens).items() if n > 1]
    if twice:
        found = f"{twice[0]!r} {Counter(tokens)[twice[0]]} times"
        yield finding("GGUF tokenizer", where, "each token once", found)
    yield from _beside_tokens(keys, model, len(tokens))


def _beside_tokens(keys: dict[str, Any], model: Any, count: int) -> Iterator[Finding]:
    for part in ("token_type", "scores"):
        name = f"tokenizer.ggml.{part}"
        values = keys.get(name)
        if values is not None and (not isinstance(values, list) or len(values) != count):
            found = len(values) if isinstance(values, list) else values
            yield finding("GGUF tokenizer", name, f"{count} values, one a token", found)
    if model == "llama" and "tokenizer.ggml.scores" not in keys:
        yield finding("GGUF tokenizer", "tokenizer.ggml.scores", "scores of tokens", "none")
    if model == "gpt2":
        if not keys.get("tokenizer.ggml.merges"):
            yield finding("GGUF tokenizer", "tokenizer.ggml.merges", "merges of tokens", "none")
        if "tokenizer.ggml.pre" not in keys:
            where = "tokenizer.ggml.pre"
            yield finding("GGUF pre-tokenizer", where, "the pre-tokenizer's name", "none")
    for role in ROLES:
        name = f"tokenizer.ggml.{role}_token_id"
        value = keys.get(name)
        if value is not None and not (type(value) is int and 0 <= value < count):
            yield finding("GGUF tokenizer", name, f"an id below {count}", value)


def _layers(container: Container) -> Iterator[Finding]:
    """Each layer's tensors against those of the others, and the outer ones against the keys."""
    keys, tensors = container.keys, container.tensors
    architecture = keys.get("general.architecture")
    count = keys.get(f"{architecture}.block_count")
    if not is_model(container) or type(count) is not int:
        return
    hidden = keys.get(f"{architecture}.embedding_length")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        expected = "the embedding"
        yield finding("GGUF tensor missing", "token_embd.weight", expected, "no such tensor")
    elif type(hidden) is int and embedding.shape[-1] != hidden:
        expected = f"{hidden} columns, {architecture}.embedding_length"
        yield finding("GGUF shape", "token_embd.weight", expected, embedding.shape)
    if count <= MOST_LAYERS:
        yield from _alike(container, count)


def _alike(container: Container, count: int) -> Iterator[Finding]:
    """What one layer of an architecture of ALIKE has, every layer has; of others, what nearly all
    have, since some alternate; in the shape that most have."""
    shapes: dict[str, Counter[tuple[int, ...]]] = {}
    for name, stored in container.tensors.items():
        layer = LAYER.fullmatch(name)
        if layer is not None and int(layer[1]) >= count:
            yield finding("GGUF shape", name, f"layers below {count}, the block_count", name)
        elif layer is not None:
            shapes.setdefault(layer[2], Counter())[stored.shape] += 1
    least = 1 if container.keys.get("general.architecture") in ALIKE else NEARLY * count
    usual = {part: c.most_common(1)[0][0] for part, c in shapes.items() if c.total() >= least}
    if not usual:
        yield finding("GGUF tensor missing", "blk.0", f"{count} layers", "no layer's tensors")
    for i in range(count):
        for part, shape in usual.items():
            name = f"blk.{i}.{part}"
            stored = container.tensors.get(name)
            if stored is None:
                yield finding("GGUF tensor missing", name, f"shape {shape}", "no such tensor")
            elif stored.shape != shape and len(shapes[part]) == 2 and shapes[part][shape] > 1:
                yield finding("GGUF shape", name, f"{shape}, as in other layers", stored.shape)
