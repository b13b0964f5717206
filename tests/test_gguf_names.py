"""Names, row order, rope divisors, hyperparameters and the choice of block types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf import hparams, names
from lowbit.quantize.gguf.hparams import Hyperparameters
from lowbit.quantize.gguf.mix import FILE_TYPES, check_file_type, choose_codec
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TINY = Hyperparameters(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    LLAMA3,
    {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 64},
]


def test_every_module_has_one_name_and_back() -> None:
    modules = list(TINY.shapes())
    mapped = [names.to_gguf(m) for m in modules]
    assert len(set(mapped)) == len(modules) == 3 + 9 * TINY.num_hidden_layers
    assert [names.to_hf(m) for m in mapped if m] == modules
    assert names.to_gguf("model.layers.1.self_attn.q_proj") == "blk.1.attn_q"
    assert names.to_gguf("model.layers.1.self_attn.rotary_emb") is None
    assert names.to_hf("blk.0.attn_qkv") is None


@given(heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(1, 3))
def test_interleaving_pairs_the_halves_of_a_head(heads: int, half: int, columns: int) -> None:
    rows = torch.arange(heads * 2 * half * columns).view(-1, columns)
    moved = names.interleave(rows, heads)
    for head in range(heads):
        for i in range(half):
            start = head * 2 * half
            assert torch.equal(moved[start + 2 * i], rows[start + i])
            assert torch.equal(moved[start + 2 * i + 1], rows[start + half + i])
    assert torch.equal(names.deinterleave(moved, heads), rows)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_divisors_are_llama_3_s(factor: float) -> None:
    h = replace(TINY, head_dim=128, rope_theta=500000.0, rope={**LLAMA3, "factor": factor})
    config = LlamaConfig(head_dim=128, rope_parameters={**h.rope, "rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    divisors = h.rope_divisors()
    assert divisors is not None
    torch.testing.assert_close(plain / divisors, scaled.double(), rtol=1e-6, atol=0)
    assert divisors[0] == 1
    assert divisors[-1] == factor


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r['rope_type']}-{len(r)}")
def test_hyperparameters_survive_config_and_keys(rope: dict[str, Any]) -> None:
    h = replace(TINY, rope=rope)
    assert hparams.from_config(hparams.to_config(h)) == h
    keys = {"general.architecture": "llama", **hparams.to_keys(h)}
    assert hparams.from_keys(keys, h.vocab_size, False, h.rope_divisors()) == h


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r['rope_type']}-{len(r)}")
def test_transformers_reads_the_config_written(rope: dict[str, Any]) -> None:
    config = LlamaConfig(**hparams.to_config(replace(TINY, rope=rope)))
    assert config.rope_parameters["rope_theta"] == TINY.rope_theta
    assert {k: config.rope_parameters[k] for k in rope} == rope
    assert hparams.from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})


def test_older_configs_are_read_too() -> None:
    config = hparams.to_config(TINY)
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "rope_theta"):
        del config[key]
    config["rope_scaling"] = {"type": "linear", "factor": 3.0}
    h = hparams.from_config(config)
    assert (h.head_dim, h.num_key_value_heads, h.rope_theta) == (16, 4, 10000.0)
    assert h.rope == {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.5,
                }
            },
            "attention_factor",
        ),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
    ],
)
def test_what_llama_cpp_would_compute_wrongly_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        hparams.from_config({**hparams.to_config(TINY), **change})


def test_a_missing_entry_is_named() -> None:
    config = hparams.to_config(TINY)
    del config["hidden_size"]
    with pytest.raises(UserError, match="hidden_size"):
        hparams.from_config(config)


@pytest.mark.parametrize(
    "divisors", [torch.linspace(1, 3, 8), torch.ones(8), torch.full((8,), float("inf"))], ids=str
)
def test_foreign_rope_divisors_are_refused(divisors: torch.Tensor) -> None:
    keys = {"general.architecture": "llama", **hparams.to_keys(TINY)}
    with pytest.raises(UserError, match="rope_freqs"):
        hparams.from_keys(keys, 96, False, divisors)


@pytest.mark.parametrize(
    ("name", "columns", "file_type", "tied", "expected"),
    [
        ("blk.0.ffn_up.weight", 256, "Q4_0", False, "Q4_0"),
        ("blk.0.ffn_up.weight", 100, "Q4_0", False, "F16"),
        ("blk.0.ffn_up.weight", 100, "BF16", False, "BF16"),
        ("token_embd.weight", 256, "Q4_0", False, "Q4_0"),
        ("token_embd.weight", 256, "Q4_0", True, "Q6_K"),
        ("output.weight", 256, "Q5_1", False, "Q6_K"),
        ("output.weight", 64, "Q5_1", False, "Q8_0"),
        ("output.weight", 65, "Q5_1", False, "F16"),
        ("output.weight", 256, "Q8_0", False, "Q8_0"),
        ("output.weight", 256, "F16", False, "F16"),
    ],
)
def test_block_types(name: str, columns: int, file_type: str, tied: bool, expected: str) -> None:
    assert choose_codec(name, (8, columns), file_type, tied).name == expected
    assert choose_codec("output_norm.weight", (columns,), file_type, tied).name == "F32"


def test_unknown_file_type_offers_the_known() -> None:
    assert check_file_type("q4_0") == "Q4_0"
    with pytest.raises(UserError, match="Q4_K_M.*" + ", ".join(FILE_TYPES)):
        check_file_type("Q4_K_M")
