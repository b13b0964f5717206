"""Names, row order, rope tensors, and hyperparameters between config.json and GGUF keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf import hparams, names, rope
from lowbit.quantize.gguf.architectures import ARCHITECTURES, LLAMA
from lowbit.quantize.gguf.blocks import CODECS
from lowbit.quantize.gguf.hparams import Hyperparameters
from lowbit.quantize.gguf.rope import Rope
from lowbit.quantize.gguf.writer import Planned, cut, part_paths, writing
from lowbit.quantize.sizes import parse_size
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .gguf_zoo import ZOO

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
WRITTEN = frozenset(SIZES)
TINY = Hyperparameters(LLAMA, SIZES, tied=False, written=WRITTEN)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    LLAMA3,
    {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 64},
]


def with_rope(scaling: dict[str, Any]) -> Hyperparameters:
    return replace(TINY, rope=Rope(scaling=scaling))


def config_of(member: str) -> dict[str, Any]:
    config = ZOO[member].config(1000)
    kind = {"gpt2": "GPT2LMHeadModel"}.get(config.model_type)
    classes = [a.classes for a in ARCHITECTURES if a.model_type == config.model_type]
    config.architectures = [kind or (classes[0][0] if classes else "MistralForCausalLM")]
    return config.to_dict()


def test_every_tensor_has_one_name() -> None:
    found = list(names.targets(TINY))
    weights = [t for t in found if t.part == "weight"]
    assert len({t.name for t in found}) == len(found)
    assert len(weights) == 3 + 9 * TINY["num_hidden_layers"]
    by_name = {t.name: t for t in found}
    query = by_name["blk.1.attn_q.weight"]
    assert query.modules == ("model.layers.1.self_attn.q_proj",)
    assert (query.heads, query.shape) == (4, (64, 64))
    assert by_name["blk.1.attn_k.bias"].shape == (32,)
    tied = [t.name for t in names.targets(replace(TINY, tied=True))]
    assert [n for n in by_name if n not in tied] == ["output.weight", "output.bias"]


@pytest.mark.parametrize("name", ZOO)
def test_placing_is_undone_by_taking(name: str) -> None:
    h = hparams.from_config(config_of(name))
    for target in names.targets(h):
        x = torch.randn(target.module_shape)
        placed = target.place(x)
        expected = target.shape[1:] if target.stacked else target.shape
        assert placed.shape == expected, target.name
        torch.testing.assert_close(target.take(placed), x, rtol=1e-6, atol=1e-6)


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
    scaling = {**LLAMA3, "factor": factor}
    config = LlamaConfig(head_dim=128, rope_parameters={**scaling, "rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    divisors = rope.tensors(Rope(500000.0, scaling), 128)[rope.FREQS]
    torch.testing.assert_close(plain / divisors, scaled.double(), rtol=1e-6, atol=0)
    assert divisors[0] == 1
    assert divisors[-1] == factor


@pytest.mark.parametrize("scaling", ROPES, ids=lambda r: f"{r['rope_type']}-{len(r)}")
def test_ropes_survive_config_and_keys(scaling: dict[str, Any]) -> None:
    h = with_rope(scaling)
    assert hparams.from_config(hparams.to_config(h)) == h
    keys = {"general.architecture": "llama", **hparams.to_keys(h)}
    back = hparams.from_keys(keys, h["vocab_size"], False, h.rope_tensors())
    assert back == h


@pytest.mark.parametrize("scaling", ROPES, ids=lambda r: f"{r['rope_type']}-{len(r)}")
def test_transformers_reads_the_rope_written(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(**hparams.to_config(with_rope(scaling)))
    read: Any = config.rope_parameters
    assert read["rope_theta"] == 10000.0
    assert {k: read[k] for k in scaling} == scaling
    assert hparams.from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("name", ZOO)
def test_hyperparameters_survive_config_and_keys(name: str) -> None:
    """Of every architecture: into keys and back, into a config that transformers reads and back."""
    h = hparams.from_config(config_of(name))
    keys = {"general.architecture": h.architecture.name, **hparams.to_keys(h)}
    back = hparams.from_keys(keys, 1000, h.tied, h.rope_tensors())
    assert (back.architecture, back.tied) == (h.architecture, h.tied)
    assert back.rope == h.rope
    assert {n: v for n, v in back.values.items() if v} == {n: v for n, v in h.values.items() if v}
    config = hparams.to_config(back)
    loaded = AutoConfig.for_model(**config).to_dict()
    again = hparams.from_config({**loaded, "architectures": config["architectures"]})
    assert hparams.to_keys(again) == hparams.to_keys(h)


def test_older_configs_are_read_too() -> None:
    config = hparams.to_config(TINY)
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "rope_theta"):
        del config[key]
    config["rope_scaling"] = {"type": "linear", "factor": 3.0}
    h = hparams.from_config(config)
    assert (h["head_dim"], h["num_key_value_heads"], h.rope.theta) == (16, 4, 10000.0)
    assert h.rope.scaling == {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor"),
        ({"partial_rotary_factor": 0.5}, "whole heads"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_size": 0}, "hidden_size must be a positive number"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be"),
    ],
)
def test_what_llama_cpp_would_compute_wrongly_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        hparams.from_config({**hparams.to_config(TINY), **change})


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen2moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen2", {"head_dim": 32}, "no other head_dim"),
        ("qwen2", {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, "llama3"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar"),
        ("gemma2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, "rope_theta"),
        ("gemma3", {"use_bidirectional_attention": True}, "encoder"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("starcoder2", {"use_bias": False}, "use_bias"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_assumptions_of_each_graph_are_checked(
    name: str, change: dict[str, Any], word: str
) -> None:
    with pytest.raises(UserError, match=word):
        hparams.from_config({**config_of(name), **change})


def test_a_window_that_llama_cpp_lacks_is_a_warning() -> None:
    config = {**config_of("mistral"), "sliding_window": 64}
    assert "sliding window of 64" in hparams.from_config(config).warnings[0]
    assert not hparams.from_config({**config, "sliding_window": 256}).warnings
    assert not hparams.from_config(config_of("gemma3")).warnings
    unused = {**config_of("qwen2"), "sliding_window": 64, "use_sliding_window": False}
    assert not hparams.from_config(unused).warnings


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
        hparams.from_keys(keys, 96, False, {rope.FREQS: divisors})


def planned(*sizes: int) -> list[Planned]:
    return [Planned(f"t{i}", (n,), CODECS["F32"]) for i, n in enumerate(sizes)]


def test_parts_are_filled_in_order() -> None:
    def sizes(limit: int | None) -> list[list[int]]:
        return [[t.weights for t in part] for part in cut(planned(10, 10, 30, 5, 5), limit)]

    assert sizes(None) == [[10, 10, 30, 5, 5]]
    assert sizes(80) == [[10, 10], [30], [5, 5]]
    assert sizes(4) == [[10], [10], [30], [5], [5]]
    assert [p.name for p in part_paths(Path("m.gguf"), 2)] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
    assert part_paths(Path("m.gguf"), 1) == [Path("m.gguf")]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("300", 300), ("5K", 5000), ("7mb", 7000000), ("2G", 2 * 10**9), ("1.5GiB", 3 << 29)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text, "--split-max-size") == nbytes


@pytest.mark.parametrize("text", ["", "0", "2X", "-1", "G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--split-max-size must be"):
        parse_size(text, "--split-max-size")


def test_names_that_llama_cpp_has_no_room_for_are_refused(tmp_path: Path) -> None:
    def attempt(name: str) -> Iterator[None]:
        tensor = Planned(name, (1,), CODECS["F32"])
        with writing(tmp_path / "m.gguf", "llama", {}, [tensor]) as writer:
            writer.write(torch.zeros(1).numpy())
        yield

    next(attempt("x" * 63))
    with pytest.raises(UserError, match="has 64 bytes"):
        next(attempt("x" * 64))
