"""Which block type each tensor of a file gets: llama-quantize's choice for every file type.

A file type has a base type (file_types.py); tensors that matter more than their size suggests get
another one. By role: values and down projections first, then the attention's output
(mix_rules.py), and the matrix that gives the logits (output, or token_embd where they are tied). Of
what no rule names, matrices get the base type, and norms, biases, routers and other small tensors
stay float32. Where columns do not fill whole blocks the type falls back to one with smaller blocks,
at last to F16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...kernels.errors import UserError
from .blocks import CODECS, Codec, codec
from .file_types import base_type
from .mix_rules import EMBEDDINGS, TINY, Facts, Place, is_70b, mixed_type

Shape = tuple[int, ...]
FALLBACKS = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q4_K": "Q5_0",
    "Q5_K": "Q5_1", "Q6_K": "Q8_0",
    **{f"IQ{t}": "IQ4_NL" for t in ("1_S", "1_M", "2_XXS", "2_XS", "2_S", "3_XXS", "3_S", "4_XS")},
}  # fmt: skip
ROLES = (  # the first that a name contains
    ("attn_qkv.weight", "value"), ("attn_kv_b.weight", "value"), ("attn_v.weight", "value"),
    ("attn_k.weight", "key"), ("attn_q.weight", "query"), ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"), ("ffn_down", "ffn_down"),
)  # fmt: skip
UNQUANTIZED = (
    "_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight",
    "ssm_conv1d", "shortconv.conv.weight",
)  # fmt: skip
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
TINY_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")


class Choice(NamedTuple):
    """`codec`: what a tensor is stored as; `wanted`: the type that its columns did not fit."""

    codec: type[Codec]
    wanted: str | None = None


def choose_types(
    shapes: Mapping[str, Shape],
    file_type: str,
    facts: Facts,
    pure: bool = False,
    overrides: Iterable[tuple[str, str]] = (),
) -> dict[str, Choice]:
    """The block type of every tensor of a file of `file_type`.

    shapes: by GGUF's names, rows first, experts before them. pure: no mix, the base type alone.
    overrides: (regular expression, type) pairs; the first that is found in a name decides.
    """
    base = base_type(file_type)
    counted: dict[str, int] = {}
    values = sum(role_of(name) == "value" for name in shapes)
    patterns = [(re.compile(pattern), kind) for pattern, kind in overrides]
    for pattern, _ in patterns:
        if not any(pattern.search(name) for name in shapes):
            raise UserError(f"no tensor's name matches '{pattern.pattern}', see blk.0.ffn_down")
    choices = {}
    for name, shape in sorted(shapes.items(), key=lambda item: (layer_of(item[0]), item[0])):
        if not is_quantized(name, shape):
            choices[name] = Choice(CODECS["F32"])
            continue
        kind = next((kind for pattern, kind in patterns if pattern.search(name)), None)
        if kind is None:
            kind = base
            if not pure and CODECS[base].block > 1:
                kind = _mixed(name, shape, file_type, facts, OUTPUT not in shapes, counted, values)
        choices[name] = fitting(kind, shape[-1])
    return {name: choices[name] for name in shapes}


def parse_override(text: str) -> tuple[str, str]:
    """ "PATTERN=TYPE" as a regular expression of tensor names and a block type's name."""
    pattern, equals, kind = text.rpartition("=")
    try:
        re.compile(pattern)
    except re.error as e:
        raise UserError(f"'{pattern}' is no regular expression: {e}") from e
    if not equals or not pattern:
        raise UserError(f"'{text}' is no PATTERN=TYPE, such as ffn_down=Q6_K")
    return pattern, codec(kind.upper()).name


def needs_importance(name: str, kind: type[Codec], file_type: str) -> bool:
    """Whether `kind` is garbage for the tensor `name` where no importance matrix has it."""
    if kind.needs_importance:
        return True
    small = kind.name in TINY_TYPES or (kind.name == "Q2_K" and file_type == "Q2_K_S")
    return small and name not in (EMBEDDING, OUTPUT)


def is_quantized(name: str, shape: Shape) -> bool:
    """Whether a tensor is a matrix, or several, that tolerates fewer bits."""
    dims = [size for size in shape[:-1] if size > 1]
    return bool(dims) and name.endswith("weight") and not any(u in name for u in UNQUANTIZED)


def fitting(kind: str, columns: int) -> Choice:
    """`kind`, or what llama-quantize falls back to when its blocks do not divide the columns."""
    for chosen in (kind, FALLBACKS.get(kind, "F16")):
        if columns % codec(chosen).block == 0:
            return Choice(CODECS[chosen], None if chosen == kind else kind)
    return Choice(CODECS["F16"], kind)


def _mixed(
    name: str,
    shape: Shape,
    file_type: str,
    facts: Facts,
    tied: bool,
    counted: dict[str, int],
    values: int,
) -> str:
    """The type by the file type's mix. `counted`: tensors of each role so far, `values`: all."""
    base = base_type(file_type)
    if name == OUTPUT or (tied and name == EMBEDDING):
        if file_type == "MXFP4_MOE" or base == "Q8_0" or shape[-1] % CODECS[base].block:
            return "Q8_0"
        return "Q5_K" if file_type in TINY or file_type == "IQ3_XXS" else "Q6_K"
    if file_type == "MXFP4_MOE":
        return "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
    if name == EMBEDDING:
        return EMBEDDINGS.get(file_type, base)
    role = role_of(name)
    if role is None:
        return base
    i = counted.get(role, 0)
    counted[role] = i + 1
    n = values if role == "value" else facts.layers
    layer = layer_of(name) if facts.experts > 1 and role != "value" else i
    kind = mixed_type(role, Place(i, n, layer, facts), file_type) or base
    if role == "value" and file_type not in TINY and kind in ("Q3_K", "Q4_K") and is_70b(facts):
        return "Q5_K"
    return kind


def role_of(name: str) -> str | None:
    return next((role for part, role in ROLES if part in name), None)


def layer_of(name: str) -> int:
    """The layer of "blk.N. ...", -1 outside of layers."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
