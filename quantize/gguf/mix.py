"""Which block type each tensor of a file gets: llama-quantize's choice for every file type.

A file type has a base type; tensors that matter more than their size suggests get another one. By
role: values and down projections first, then the attention's output, and the matrix that gives the
logits (output, or token_embd where they are tied). `MIXES` has a rule for each role that a file
type treats apart. Of what no rule names, matrices get the base type, and norms, biases, routers and
other small tensors stay float32. Where columns do not fill whole blocks the type falls back to one
with smaller blocks, at last to F16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ...kernels.errors import UserError, did_you_mean
from .blocks import CODECS, Codec, codec

Shape = tuple[int, ...]


FILE_TYPES = {  # by name: general.file_type
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20,
    "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25,
    "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38,
}  # fmt: skip
BASE_TYPES = {  # of most matrices, where it is not the file type's own name
    **{f"Q3_K_{size}": "Q3_K" for size in "SML"},
    **{f"Q{bits}_K_{size}": f"Q{bits}_K" for bits in "45" for size in "SM"},
    "Q2_K_S": "Q2_K", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S",
    "MXFP4_MOE": "MXFP4",
}  # fmt: skip
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
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


class Facts(NamedTuple):
    """What the choice depends on beside names and shapes.

    `layers`, `heads`, `kv_heads`: as config.json has them; `experts`: of a layer, 0 where dense;
    `importance`: whether there is an importance matrix.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    importance: bool = False


class Place(NamedTuple):
    """A tensor among those of its role: number `i` of `n`. `layer` differs from `i` where a layer
    has several; `facts`: the model's."""

    i: int
    n: int
    layer: int
    facts: Facts

    @property
    def shares_values(self) -> bool:
        """Whether so many heads share a value head that more bits for it cost little."""
        return self.facts.heads // self.facts.kv_heads >= 4


Rule = Callable[[Place], str | None]  # the type, or None for the base type


class Choice(NamedTuple):
    """`codec`: what a tensor is stored as; `wanted`: the type that its columns did not fit."""

    codec: type[Codec]
    wanted: str | None = None


def always(kind: str) -> Rule:
    return lambda place: kind


def first(part: int, kind: str, otherwise: str | None = None) -> Rule:
    """`kind` in the first of `part` equal parts of the layers."""
    return lambda place: kind if place.layer < place.n // part else otherwise


def spread(kind: str) -> Rule:
    """`kind` at both ends of the model and in every third layer between."""
    return lambda place: kind if more_bits(place.layer, place.n) else None


def more_bits(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def shared(kind: str, otherwise: str | None = None) -> Rule:
    return lambda place: kind if place.shares_values else otherwise


def unweighted(rule: Rule) -> Rule:
    """`rule` where there is no importance matrix."""
    return lambda place: None if place.facts.importance else rule(place)


def weighted(rule: Rule) -> Rule:
    return lambda place: rule(place) if place.facts.importance else None


def middle(kind: str) -> Rule:
    return lambda place: kind if place.n // 8 <= place.layer < 7 * place.n // 8 else None


def begins(count: int, kind: str, otherwise: str | None = None) -> Rule:
    return lambda place: kind if place.i < count else otherwise


def _iq3_m_down(place: Place) -> str | None:
    sprinkled = place.facts.experts == 8 and more_bits(place.layer, place.n)
    return "Q4_K" if sprinkled or place.layer < place.n // 8 else None


def _tiny(small: str, attn_output: str | None) -> dict[str, Rule]:
    """The mix of the types below 3 bits: `small` is the type a step above the base."""

    def value(place: Place) -> str:
        return "Q4_K" if place.shares_values or place.facts.experts >= 4 else small

    def down(place: Place) -> str | None:
        return small if place.i < place.n // 8 else None

    rules: dict[str, Rule] = {"value": value, "ffn_down": down}
    return {**rules, "attn_output": always(attn_output)} if attn_output else rules


MIXES: dict[str, dict[str, Rule]] = {
    "Q4_0": {"ffn_down": weighted(first(8, "Q4_1"))},
    "Q5_0": {"ffn_down": weighted(first(8, "Q5_1"))},
    "Q2_K": {
        "value": shared("Q4_K", "Q3_K"), "ffn_down": always("Q3_K"), "attn_output": always("Q3_K"),
    },
    "Q2_K_S": {"value": shared("Q4_K"), "ffn_down": first(8, "Q4_K")},
    "Q3_K_M": {
        "value": begins(2, "Q5_K", "Q4_K"), "ffn_down": first(16, "Q5_K", "Q4_K"),
        "attn_output": always("Q4_K"),
    },
    "Q3_K_L": {r: always("Q5_K") for r in ("value", "ffn_down", "attn_output")},
    "Q4_K_S": {"value": begins(4, "Q5_K"), "ffn_down": first(8, "Q5_K")},
    "Q4_K_M": {"value": spread("Q6_K"), "ffn_down": spread("Q6_K")},
    "Q5_K_M": {"value": spread("Q6_K"), "ffn_down": spread("Q6_K")},
    **{
        t: {"value": shared("Q5_K"), "ffn_down": unweighted(first(8, "Q5_K"))}
        for t in ("IQ4_NL", "IQ4_XS")
    },
    "IQ3_M": {"value": always("Q4_K"), "ffn_down": _iq3_m_down, "attn_output": always("Q4_K")},
    "IQ3_S": {"value": shared("Q4_K")},
    "IQ3_XS": {
        "value": shared("Q4_K"), "key": always("IQ3_XXS"), "query": always("IQ3_XXS"),
        "ffn_gate": middle("IQ3_XXS"), "ffn_up": middle("IQ3_XXS"),
    },
    "IQ3_XXS": {
        "value": lambda p: "Q4_K" if p.shares_values else None if p.facts.importance else "IQ3_S",
        "key": always("IQ2_S"), "query": always("IQ2_S"), "attn_output": always("IQ3_S"),
        "ffn_down": unweighted(first(8, "Q4_K", "Q3_K")),
    },
    **{t: _tiny("IQ3_S", "IQ3_S") for t in ("IQ2_S", "IQ2_M")},
    **{t: _tiny("Q2_K", None) for t in ("IQ2_XXS", "IQ2_XS")},
    **{t: _tiny("Q2_K", "IQ2_XXS") for t in ("IQ1_S", "IQ1_M")},
}  # fmt: skip
TINY = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
EMBEDDINGS = {  # of untied models, where not the base type
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "Q2_K"),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "IQ3_S"),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "Q4_K"),
}
TINY_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
EIGHT_EXPERTS = {  # the attention of Mixtral is small beside its experts
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ3_XS", "IQ3_XXS", "IQ3_S", "IQ3_M"),
    *("IQ4_NL", "IQ4_XS"),
}


def check_file_type(file_type: str) -> str:
    """`file_type` in its usual spelling; UserError when there is none such."""
    name = ALIASES.get(file_type.upper(), file_type.upper())
    if name not in FILE_TYPES:
        hint = did_you_mean(name, FILE_TYPES)
        raise UserError(f"unknown GGUF type '{file_type}'{hint}; known: {', '.join(FILE_TYPES)}")
    return name


def base_type(file_type: str) -> str:
    """The block type of most matrices of a file."""
    return BASE_TYPES.get(file_type, file_type)


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
    place = Place(i, n, layer, facts)
    if facts.experts == 8 and (special := _eight_experts(role, file_type)) is not None:
        return special or base
    kind = MIXES.get(file_type, {}).get(role, lambda place: None)(place) or base
    if role == "value" and file_type not in TINY and kind in ("Q3_K", "Q4_K") and is_70b(facts):
        return "Q5_K"
    return kind


def _eight_experts(role: str, file_type: str) -> str | None:
    """The type of a role in models of eight experts, "" for the base type, None for the mix's."""
    if role == "key":
        return "Q4_K" if file_type in TINY else "Q8_0"
    if role == "value":
        return None if file_type in TINY else "Q8_0"
    if role == "attn_output":
        return "Q5_K" if file_type in TINY or file_type in EIGHT_EXPERTS else ""
    return None


def is_70b(facts: Facts) -> bool:
    """Llama 2 and 3 of 70B, told by their layers, whose values are an eighth of their queries."""
    return facts.architecture == "llama" and facts.layers == 80 and facts.heads != facts.kv_heads


def role_of(name: str) -> str | None:
    return next((role for part, role in ROLES if part in name), None)


def layer_of(name: str) -> int:
    """The layer of "blk.N. ...", -1 outside of layers."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
