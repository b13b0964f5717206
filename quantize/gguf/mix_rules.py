"""What llama-quantize's mixes give the tensors that matter more than their size suggests.

`MIXES` has a rule for each role that a file type treats apart; a rule tells the block type from a
tensor's place among those of its role.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


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
EIGHT_EXPERTS = {  # the attention of Mixtral is small beside its experts
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ3_XS", "IQ3_XXS", "IQ3_S", "IQ3_M"),
    *("IQ4_NL", "IQ4_XS"),
}


def mixed_type(role: str, place: Place, file_type: str) -> str | None:
    """The type of a tensor of `role` at `place`, None for the file's base type."""
    if place.facts.experts == 8 and (special := _eight_experts(role, file_type)) is not None:
        return special or None
    rule = MIXES.get(file_type, {}).get(role)
    return rule(place) if rule else None


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
