"""Keys and values as codes: how far they may move, what shares a scale, names and config.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import UserError
from lowbit.kernels.kv_quant import (
    KVFormat,
    dequantize_kv,
    fake_quantize_kv,
    quantize_kv,
    rotate_heads,
)
from lowbit.quantize.checkpoint.kv_config import (
    OWN_KEY,
    kv_spec_from_config,
    with_kv_cache,
)
from lowbit.quantize.kv_names import describe_kv, kv_spec_from_name
from lowbit.quantize.spec import Group, Head, KVSpec, QuantSpec, TensorWise, Token, TokenGroup
from torch import Tensor

NAMES = (
    "int8", "int8_static", "int8_head", "fp8", "fp8_head", "fp8_dynamic", "int4", "int3", "int2",
    "k4v2", "k8v4", "k16v2", "k4v16", "int4_hadamard", "int4_token_g16", "int4_postrope_g64",
    "int6_sym",
)  # fmt: skip


def states(batch: int = 2, heads: int = 3, tokens: int = 64, head_dim: int = 32) -> Tensor:
    """Keys with what makes them hard: channels far from zero, a large token, a head of zeros."""
    x = torch.randn(batch, heads, tokens, head_dim, generator=torch.Generator().manual_seed(0))
    x[:, :, :, 3] += 40
    x[:, :, 5] *= 20
    x[:, 1] = 0
    x[0, 2] *= 1e-3
    return x


def squared_error(x: Tensor, fmt: KVFormat) -> float:
    return float((fake_quantize_kv(x, fmt) - x).square().mean())


@settings(max_examples=40, deadline=None)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    axis=st.sampled_from(["channels", "tokens"]),
    group=st.sampled_from([8, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_value_moves_by_half_a_step_at_most(
    bits: int, symmetric: bool, axis: Any, group: int, dtype: torch.dtype
) -> None:
    x = states().to(dtype)
    fmt = KVFormat("int", bits, symmetric, axis, group)
    entries = quantize_kv(x, fmt)
    assert entries.scale is not None
    along = 3 if axis == "channels" else 2
    step = entries.scale.float().repeat_interleave(group, dim=along)
    back = dequantize_kv(entries, fmt, 32, torch.float32)
    assert bool(((back - x.float()).abs() <= step * 0.501).all())
    if symmetric:
        assert bool((back[x == 0] == 0).all())


def test_e4m3_moves_a_value_by_a_sixteenth_of_itself_at_most() -> None:
    x = states()
    back = fake_quantize_kv(x, KVFormat("float", 8, True, "channels", 32))
    smallest = x.abs().amax(3, keepdim=True).clamp(min=1e-3) / 448 * 2**-6
    assert bool(((back - x).abs() <= x.abs() / 16 * 1.001 + smallest / 16).all())


def test_static_scales_saturate_what_lies_beyond() -> None:
    x = torch.tensor([0.0, 1.0, -1.26, 1e4]).expand(1, 2, 1, 4)
    scale = torch.tensor([0.1, 1.0])
    back = fake_quantize_kv(x, KVFormat("int", 8, True, "static"), scale)
    want = torch.tensor([[0.0, 1.0, -1.3, 12.7], [0.0, 1.0, -1.0, 127.0]])
    assert torch.allclose(back[0, :, 0], want)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_the_rotation_is_its_own_inverse_and_keeps_attention(head_dim: int) -> None:
    queries, keys = states(head_dim=head_dim), states(head_dim=head_dim).flip(2)
    assert torch.allclose(rotate_heads(rotate_heads(keys)), keys, atol=1e-3, rtol=1e-4)
    scores = queries.double() @ keys.double().mT
    rotated = rotate_heads(queries).double() @ rotate_heads(keys).double().mT
    assert torch.allclose(rotated, scores, atol=float(scores.abs().max()) * 1e-6)


def test_rotated_keys_come_back_closer_where_a_channel_is_large() -> None:
    x = torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(1))
    x[..., 7] *= 20  # of either sign: an offset does not help
    plain = KVFormat("int", 4, False, "channels", 64)
    rotated = squared_error(x, plain._replace(rotate=True))
    assert rotated < 0.5 * squared_error(x, plain)
    coarse = squared_error(x, plain._replace(num_bits=8, rotate=True))
    assert coarse < rotated / 100


def test_scales_of_channels_suit_a_channel_that_is_large_at_every_token() -> None:
    x = torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(2))
    x[..., 7] += 30
    by_token = squared_error(x, KVFormat("int", 4, False, "channels", 64, rotate=True))
    assert squared_error(x, KVFormat("int", 4, False, "tokens", 32)) < 0.2 * by_token


def test_a_group_of_tokens_stays_as_it_is_until_it_is_whole() -> None:
    fmt, x = KVFormat("int", 2, False, "tokens", 32), states(tokens=70)
    back = fake_quantize_kv(x, fmt)
    assert torch.equal(back[:, :, 64:], x[:, :, 64:])
    assert torch.equal(back[:, :, :32], fake_quantize_kv(x[:, :, :32], fmt))
    assert torch.equal(fake_quantize_kv(x[:, :, :31], fmt), x[:, :, :31])


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_take_their_bits_and_no_more(bits: int) -> None:
    entries = quantize_kv(states(), KVFormat("int", bits, False, "channels", 32))
    assert entries.scale is not None and entries.offset is not None
    assert entries.codes.nbytes * 8 == states().numel() * bits
    assert entries.scale.nbytes + entries.offset.nbytes == states().numel() // 32 * 4


def test_a_name_says_what_is_stored() -> None:
    token = QuantSpec(8, granularity=Token(), dynamic=True)
    assert kv_spec_from_name("int8") == KVSpec(token, token)
    static = QuantSpec(8, "float", TensorWise())
    assert kv_spec_from_name("FP8") == kv_spec_from_name("fp8_e4m3") == KVSpec(static, static)
    k4v2 = kv_spec_from_name("k4v2", skip_layers=(0,))
    assert (k4v2.key, k4v2.value) == (
        QuantSpec(4, "int", TokenGroup(32), symmetric=False, dynamic=True),
        QuantSpec(2, "int", Token(), symmetric=False, dynamic=True),
    )
    assert k4v2.key_before_rope and k4v2.rotate_value and k4v2.skip_layers == (0,)
    k16v2 = kv_spec_from_name("k16v2_g16")
    assert k16v2.key is None and k16v2.value is not None
    assert k16v2.value.granularity == Group(16)
    head = kv_spec_from_name("int8_head")
    assert head.is_static and head.key is not None and head.key.granularity == Head()
    hadamard = kv_spec_from_name("int4_hadamard_sym")
    assert hadamard.rotate_key and hadamard.rotate_value and not hadamard.key_before_rope
    assert describe_kv(k4v2) == (
        "K int4 by channel of 32 tokens, before RoPE; V int2 by token, rotated; not in layers 0"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int", "unknown KV format 'int': it is int2 to int8, fp8 or"),
        ("int9", "2 to 8 bits, got num_bits=9"),
        ("k1v4", "2 to 8 bits, got num_bits=1"),
        ("int4_static", "KV format 'int4_static': static scales are for 8 bits"),
        ("int4_best", "unknown option 'best'"),
        ("fp8_g32", "static scales have no groups"),
        ("k16v16", "is not quantized"),
        ("k16v4_channel", "the keys stay as they are"),
        ("int8_g0", "at least 1, got 0"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kv_spec_from_name(name)


@pytest.mark.parametrize("name", NAMES)
def test_config_json_says_it_all(name: str) -> None:
    spec = kv_spec_from_name(name, (1, 3) if "2" in name else ())
    config = json.loads(json.dumps(with_kv_cache({"model_type": "llama"}, spec, "0")))
    assert kv_spec_from_config(config) == spec
    standard = name.startswith(("int8", "fp8"))
    assert (OWN_KEY in config) is not standard
    assert ("quantization_config" in config) is standard


@pytest.mark.parametrize("name", ["int8_static", "fp8", "fp8_head", "fp8_dynamic"])
def test_what_compressed_tensors_can_say_is_said_in_its_words(name: str) -> None:
    config = with_kv_cache({}, kv_spec_from_name(name), "0")["quantization_config"]
    read = QuantizationConfig.model_validate(config).kv_cache_scheme
    assert read is not None and read.num_bits == 8 and read.symmetric
    assert read.type == ("float" if name.startswith("fp8") else "int")
    strategies = {"fp8_head": "attn_head", "fp8_dynamic": "token"}
    assert read.strategy == strategies.get(name, "tensor")
    assert bool(read.dynamic) is (name == "fp8_dynamic")


@pytest.mark.parametrize(
    "config",
    [
        {OWN_KEY: {"key": None}},
        {OWN_KEY: []},
        {"quantization_config": {"kv_cache_scheme": {"strategy": "tensor"}}},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "strategy": "spiral"}}},
    ],
)
def test_a_damaged_config_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{OWN_KEY}|kv_cache_scheme|strategy 'spiral'"):
        kv_spec_from_config(config)
