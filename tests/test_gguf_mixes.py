"""The block type of every tensor: llama-quantize's own choice, and what is asked beside it."""

from __future__ import annotations

from typing import Any

import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf.blocks import codec
from lowbit.quantize.gguf.file_types import FILE_TYPES, check_file_type
from lowbit.quantize.gguf.mix import choose_types, fitting, needs_importance, parse_override
from lowbit.quantize.gguf.mix_rules import Facts, more_bits

from .gguf_mixes import recorded

MODELS = recorded()
SHAPES = {
    "token_embd.weight": (512, 256),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.ffn_down.weight": (256, 512),
    "output.weight": (512, 256),
}
FACTS = Facts("llama", 1, 4, 4)


def facts_of(model: dict[str, Any], importance: bool) -> Facts:
    return Facts(
        "llama", model["layers"], model["heads"], model["kv_heads"], model["experts"], importance
    )


@pytest.mark.parametrize("file_type", FILE_TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_types_are_those_of_llama_quantize(name: str, file_type: str) -> None:
    model = MODELS[name]
    shapes = {n: tuple(shape) for n, shape in model["shapes"].items()}
    for importance in (False, True):
        expected = model["types"][file_type + " imatrix" * importance]
        chosen = choose_types(shapes, file_type, facts_of(model, importance))
        assert [c.codec.name for c in chosen.values()] == expected
        assert list(chosen) == list(shapes)


def test_the_record_covers_what_the_mixes_depend_on() -> None:
    dense = [m for m in MODELS.values() if not m["experts"]]
    assert {m["heads"] // m["kv_heads"] >= 4 for m in dense} == {True, False}
    assert {"output.weight" in m["shapes"] for m in MODELS.values()} == {True, False}
    assert {m["experts"] for m in MODELS.values()} >= {0, 4, 8}
    assert any(s[-1] % 256 for m in MODELS.values() for s in m["shapes"].values())
    assert any(m["layers"] >= 32 for m in MODELS.values())  # a 16th of them is more than one


def test_more_bits_go_to_both_ends_and_every_third_layer() -> None:
    assert [i for i in range(24) if more_bits(i, 24)] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]


def test_70b_has_values_of_five_bits() -> None:
    shapes = {f"blk.{i}.attn_v.weight": (1024, 8192) for i in range(80)}
    for facts, expected in (
        (Facts("llama", 80, 64, 8), "Q5_K"),
        (Facts("qwen2", 80, 64, 8), "Q4_K"),
    ):
        chosen = choose_types(shapes, "Q2_K", facts)
        assert {c.codec.name for c in chosen.values()} == {expected}


def test_pure_and_patterns() -> None:
    pure = choose_types(SHAPES, "Q4_K_M", FACTS, pure=True)
    assert {n: c.codec.name for n, c in pure.items() if len(SHAPES[n]) > 1} == {
        n: "Q4_K" for n in SHAPES if len(SHAPES[n]) > 1
    }
    overrides = [parse_override("ffn_down=q8_0"), parse_override(r"^output\.weight$=F16")]
    chosen = choose_types(SHAPES, "Q4_K_M", FACTS, overrides=[*overrides, ("ffn", "Q2_K")])
    kinds = {n: c.codec.name for n, c in chosen.items()}
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"  # the first that matches
    assert (kinds["output.weight"], kinds["blk.0.attn_norm.weight"]) == ("F16", "F32")
    with pytest.raises(UserError, match="ffn_dwn"):
        choose_types(SHAPES, "Q4_K_M", FACTS, overrides=[("ffn_dwn", "Q2_K")])
    for text, word in (("ffn_down", "PATTERN=TYPE"), ("a=Q9_K", "Q9_K"), ("(=Q4_K", "regular")):
        with pytest.raises(UserError, match=word):
            parse_override(text)


def test_columns_that_fill_no_block_fall_back() -> None:
    assert fitting("Q4_K", 512).codec.name == "Q4_K"
    assert fitting("Q4_K", 96) == (codec("Q5_0"), "Q4_K")
    assert fitting("IQ3_S", 96) == (codec("IQ4_NL"), "IQ3_S")
    assert fitting("Q6_K", 80) == (codec("F16"), "Q6_K")


def test_which_types_need_an_importance_matrix() -> None:
    assert needs_importance("blk.0.attn_q.weight", codec("IQ3_XXS"), "IQ3_XXS")
    assert needs_importance("blk.0.attn_q.weight", codec("Q2_K"), "Q2_K_S")
    assert not needs_importance("blk.0.attn_q.weight", codec("Q2_K"), "Q2_K")
    assert not needs_importance("token_embd.weight", codec("IQ3_XXS"), "IQ3_XXS")
    assert not needs_importance("blk.0.attn_q.weight", codec("IQ3_S"), "IQ3_M")


def test_names_of_file_types() -> None:
    assert check_file_type("q4_k") == "Q4_K_M"
    with pytest.raises(UserError, match="did you mean 'Q4_K_S'"):
        check_file_type("Q4_KS")
