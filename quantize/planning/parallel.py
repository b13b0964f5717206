"""Tensor parallelism and fused linears: what engines cut apart and what they run as one.

vLLM's and Megatron's way: the linears that read the hidden states are cut by output rows (column
parallel), those that write them back by input columns (row parallel). A cut must not go through a
group, a block, a head or a word of packed codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..checkpoint.ct_config import format_of
from ..linear_names import fused_peers
from ..spec import Block, Group, LayerScheme

Role = Literal["column", "row", "whole"]

SIZES = (2, 4, 8)
COLUMN = frozenset({
    "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv", "query", "key", "value",
    "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "fc_in",
    "c_fc", "dense_h_to_4h", "in_proj", "in_proj_qkv", "in_proj_z", "lm_head", "embed_out",
    "output",
})  # fmt: skip
ROW = frozenset({
    "o_proj", "out_proj", "dense", "down_proj", "w2", "fc2", "fc_out", "c_proj", "wo",
    "dense_4h_to_h",
})  # fmt: skip
KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})
WORD_BITS = 32


class Heads(NamedTuple):
    """Attention heads of a model, None where its config does not say."""

    queries: int | None
    keys_and_values: int | None


def heads_of(config: Mapping[str, Any]) -> Heads:
    """The heads that a config.json names; those of multimodal models' language part."""
    text = config.get("text_config") or config
    queries = text.get("num_attention_heads")
    return Heads(queries, text.get("num_key_value_heads") or queries)


def role_of(module: str) -> Role:
    """How engines cut the linear of that name; "whole": each device holds all of it."""
    leaf = module.rpartition(".")[2]
    return "column" if leaf in COLUMN else "row" if leaf in ROW else "whole"


def cut_refusal(
    module: str, shape: tuple[int, int], scheme: LayerScheme | None, heads: Heads, devices: int
) -> str | None:
    """Why a linear [out, in] cannot be cut for so many devices; None: it can, or is not cut.

    scheme: None where its weight stays as it is.
    """
    role = role_of(module)
    if role == "whole":
        return None
    rows, columns = shape
    if role == "row":
        return _column_cut(columns, scheme, devices)
    leaf = module.rpartition(".")[2]
    cuts = devices
    if leaf in KEYS_AND_VALUES and heads.keys_and_values:
        if devices % heads.keys_and_values and heads.keys_and_values % devices:
            return f"{heads.keys_and_values} key/value heads do not divide among {devices} devices"
        cuts = min(devices, heads.keys_and_values)  # fewer heads than devices are repeated
    elif leaf == "q_proj" and heads.queries and heads.queries % devices:
        return f"{heads.queries} heads do not divide among {devices} devices"
    return _row_cut(rows, scheme, cuts)


def _column_cut(columns: int, scheme: LayerScheme | None, devices: int) -> str | None:
    if columns % devices:
        return f"{columns} input columns do not divide among {devices} devices"
    if scheme is None:
        return None
    part, spec = columns // devices, scheme.weights
    match spec.granularity:
        case Group(size) if part % size:
            return f"{part} input columns a device cut groups of {size}"
        case Block(_, wide) if part % wide:
            return f"{part} input columns a device cut blocks of {wide} columns"
    if _is_packed(scheme) and part * spec.num_bits % WORD_BITS:
        return f"{part} codes a device of {spec.num_bits} bits cut a packed word"
    return None


def _row_cut(rows: int, scheme: LayerScheme | None, devices: int) -> str | None:
    if rows % devices:
        return f"{rows} output rows do not divide among {devices} devices"
    if scheme is None:
        return None
    part, spec = rows // devices, scheme.weights
    match spec.granularity:
        case Block(tall, _) if devices > 1 and part % tall:
            return f"{part} output rows a device cut blocks of {tall} rows"
    if _is_packed(scheme) and not spec.symmetric and part * spec.num_bits % WORD_BITS:
        return f"{part} zero-points a device of {spec.num_bits} bits cut a packed word"
    return None


def _is_packed(scheme: LayerScheme) -> bool:
    return format_of(scheme) == "pack-quantized"


class UnlikePeers(NamedTuple):
    """Linears that engines run as one, and the scheme of each in words (None: not quantized)."""

    modules: tuple[str, ...]
    schemes: tuple[LayerScheme | None, ...]


def unlike_peers(schemes: Mapping[str, LayerScheme | None]) -> list[UnlikePeers]:
    """The linears that engines run as one although their schemes differ.

    schemes: of every linear of the decoder layers. A layer's experts are one group too: engines
    run them in one kernel.
    """
    groups = [*fused_peers(list(schemes)), *_expert_stacks(schemes)]
    return [
        UnlikePeers(tuple(g), tuple(schemes[m] for m in g))
        for g in groups
        if len({schemes[m] for m in g}) > 1
    ]


def fused_rows(shapes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Module -> output rows of the linear that engines fuse it into (its own where they do not)."""
    rows: dict[str, int] = {}
    for group in fused_peers(list(shapes)):
        total = sum(shapes[m][0] for m in group)
        rows |= dict.fromkeys(group, total)
    return rows


def is_expert(module: str) -> bool:
    """Whether the linear belongs to one of several experts (experts.N.NAME)."""
    return expert_stack(module) is not None


def expert_stack(module: str) -> str | None:
    """The path of the layer's experts that the linear is part of, None outside of experts."""
    parts = module.split(".")
    inside = len(parts) >= 3 and parts[-2].isdigit() and "expert" in parts[-3]
    return ".".join(parts[:-2]) if inside else None


def _expert_stacks(modules: Mapping[str, Any]) -> Sequence[list[str]]:
    stacks: dict[str, list[str]] = {}
    for module in modules:
        stack = expert_stack(module)
        if stack is not None:
            stacks.setdefault(stack, []).append(module)
    return list(stacks.values())
