"""Damage to a GGUF file's keys and tensors that leaves its container whole.

A changed byte of a GGUF file mostly breaks a length, and the container's check is all that is
tried. Here a key gets an odd value of its own type, another type, another key's value; a key that
some architecture has comes in or goes out; arrays lose, double or change items; tensors get other
names, shapes and types, with bytes to fit. So it is the readers of the values that are tried.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ..quantize.gguf.container import ARRAY, SCALARS, STRING
from .gguf_table import Key, Row, Table, read_table, write_table
from .mutations import MOST_EDITS, NUMBERS, ODD_VALUES, Choose

Edit = Callable[[Table, Choose], None]

U32, F32, BOOL = 4, 6, 7
INTEGERS = (-(1 << 63), -(1 << 31), -1, 2, 3, 32, 64, (1 << 31) - 1, (1 << 63) - 1, *NUMBERS)
FLOATS = (0.0, -0.0, -1.0, 0.5, 1.0, 1e-38, 1e-5, 1e4, 3e38, float("inf"), float("nan"))
TEXTS = (
    *(v.encode("utf-8", "surrogatepass") for v in ODD_VALUES if isinstance(v, str)),
    *(b"llama", b"gpt2", b"bert", b"spm", b"linear", b"yarn", b"longrope", b"adapter", b"mmproj"),
    *("\u2581a".encode(), "\u0120t h".encode(), b"<0x0A>", b"<0xZZ>", b"{% for %}", b"t h"),
)
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2",
    "granite", "starcoder2", "gpt2", "mamba",
)  # fmt: skip
DIMENSIONS = (0, 1, 2, 31, 32, 33, 64, 256, 1 << 20, 1 << 31, 1 << 48, 1 << 63)
BLOCK_TYPES = (0, 1, 2, 3, 6, 7, 8, 9, *range(10, 31), 34, 35, 36, 39, 40, 4, 255, 1 << 31)
MODEL_KEYS = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
    "attention.sliding_window", "attention.scale", "attention.causal", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "logit_scale",
    "embedding_scale", "residual_scale", "final_logit_softcapping", "attn_logit_softcapping",
)  # fmt: skip
OTHER_KEYS = (
    "general.architecture", "general.type", "general.alignment", "general.file_type",
    "general.quantization_version", "split.no", "split.count", "split.tensors.count",
    "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size", "tokenizer.chat_template",
    *(f"tokenizer.ggml.{leaf}" for leaf in (
        "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id",
        "eot_token_id", "unknown_token_id", "padding_token_id", "seperator_token_id",
        "add_bos_token", "add_eos_token", "add_space_prefix", "precompiled_charsmap",
    )),
)  # fmt: skip
TENSORS = (
    "token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight",
    "rope_factors_long.weight", "blk.0.attn_q.weight", "blk.0.attn_k.bias", "blk.0.attn_qkv.weight",
    "blk.0.ffn_gate_exps.weight", "blk.1.ffn_up.weight", "blk.99999999999.ffn_up.weight", "x",
)  # fmt: skip


def mutate_gguf(data: bytes, choose: Choose) -> bytes:
    """The whole GGUF file `data` with one to MOST_EDITS of its keys and tensors changed."""
    table = read_table(data)
    for _ in range(1 + choose(MOST_EDITS)):
        _EDITS[choose(len(_EDITS))](table, choose)
    return write_table(table)


def odd_value(kind: int, choose: Choose) -> Any:
    """A value of the type `kind`, at the edge of what it holds or not what any key means."""
    if kind == STRING:
        return TEXTS[choose(len(TEXTS))]
    if kind == ARRAY:
        inner = _scalar_kind(choose)
        return inner, [odd_value(inner, choose) for _ in range(choose(4))]
    code = SCALARS[kind]
    if code in "fd":
        return FLOATS[choose(len(FLOATS))]
    if code == "?":
        return bool(choose(2))
    bits = 8 * struct.calcsize("<" + code)
    low, high = (0, (1 << bits) - 1) if code.isupper() else (-1 << bits - 1, (1 << bits - 1) - 1)
    held = [n for n in INTEGERS if low <= n <= high]
    return held[choose(len(held))]


def _scalar_kind(choose: Choose) -> int:
    """Any type but that of arrays."""
    kinds = (*SCALARS, STRING)
    return kinds[choose(len(kinds))]


def _odd_value(table: Table, choose: Choose) -> None:
    key = _key(table, choose)
    if key is None:
        return
    if key.kind == ARRAY:
        key.value = _odd_items(key.value[0], list(key.value[1]), choose)
    else:
        key.value = odd_value(key.kind, choose)


def _odd_items(inner: int, items: list[Any], choose: Choose) -> tuple[int, list[Any]]:
    """An array with an item changed, doubled or taken away, cut short, or of another type."""
    how = choose(5)
    at = choose(len(items)) if items else 0
    if how == 0 or not items:
        return odd_value(ARRAY, choose)
    if how == 1:
        return inner, items[:at]
    if how == 2:
        return inner, [*items, items[at]]
    if how == 3:
        return inner, [*items[:at], *items[at + 1 :]]
    items[at] = odd_value(inner, choose)
    return inner, items


def _other_type(table: Table, choose: Choose) -> None:
    key = _key(table, choose)
    if key is not None:
        key.kind = ARRAY if choose(3) == 0 else _scalar_kind(choose)
        key.value = odd_value(key.kind, choose)


def _other_key_s_value(table: Table, choose: Choose) -> None:
    key, other = _key(table, choose), _key(table, choose)
    if key is not None and other is not None:
        key.kind, key.value = other.kind, other.value


def _remove_key(table: Table, choose: Choose) -> None:
    if table.keys:
        del table.keys[choose(len(table.keys))]


def _known_key(table: Table, choose: Choose) -> None:
    """A key that some file has, as a number, a text or an array; in place of the old one."""
    if choose(2):
        name = _architecture(table) + b"." + MODEL_KEYS[choose(len(MODEL_KEYS))].encode()
    else:
        name = OTHER_KEYS[choose(len(OTHER_KEYS))].encode()
    kind = (U32, U32, F32, BOOL, STRING, ARRAY)[choose(6)]
    table.keys = [k for k in table.keys if k.name != name]
    table.keys.append(Key(name, kind, odd_value(kind, choose)))


def _other_architecture(table: Table, choose: Choose) -> None:
    """Another one by name, to which the numbers belong from now on."""
    old, new = _architecture(table), ARCHITECTURES[choose(len(ARCHITECTURES))].encode()
    for key in table.keys:
        if key.name == b"general.architecture":
            key.kind, key.value = STRING, new
        elif key.name.startswith(old + b"."):
            key.name = new + key.name[len(old) :]


def _architecture(table: Table) -> bytes:
    value = next((k.value for k in table.keys if k.name == b"general.architecture"), b"")
    return value if isinstance(value, bytes) else b""


def _tensor_shape(table: Table, choose: Choose) -> None:
    row = _row(table, choose)
    if row is None:
        return
    how = choose(4)
    if how == 0:
        row.dims = row.dims[::-1]
    elif how == 1:
        row.dims = [*row.dims, 1]
    else:
        row.dims = list(row.dims)
        row.dims[choose(len(row.dims))] = DIMENSIONS[choose(len(DIMENSIONS))]


def _tensor_type(table: Table, choose: Choose) -> None:
    row = _row(table, choose)
    if row is not None:
        row.kind = BLOCK_TYPES[choose(len(BLOCK_TYPES))]


def _tensor_name(table: Table, choose: Choose) -> None:
    """Another name, or two that change places."""
    row, other = _row(table, choose), _row(table, choose)
    if row is None or other is None:
        return
    if choose(2):
        row.name, other.name = other.name, row.name
    else:
        row.name = TENSORS[choose(len(TENSORS))].encode()


def _remove_tensor(table: Table, choose: Choose) -> None:
    if table.rows:
        del table.rows[choose(len(table.rows))]


def _key(table: Table, choose: Choose) -> Key | None:
    return table.keys[choose(len(table.keys))] if table.keys else None


def _row(table: Table, choose: Choose) -> Row | None:
    return table.rows[choose(len(table.rows))] if table.rows else None


_EDITS: tuple[Edit, ...] = (
    _odd_value, _odd_value, _odd_value, _known_key, _known_key, _other_type, _other_key_s_value,
    _remove_key, _other_architecture, _tensor_shape, _tensor_type, _tensor_name, _remove_tensor,
)  # fmt: skip
