"""Layouts: twins that undo each other, words as published, labels told from the content."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import UserError
from lowbit.kernels.packing import padded_words, unpack_padded
from lowbit.quantize.checkpoint.layouts import LAYOUTS, NATIVE, Layout, find_layout, layout_of
from lowbit.quantize.checkpoint.layouts.gptq import GPTQ
from lowbit.quantize.checkpoint.layouts.gptq_config import gptq_config
from lowbit.quantize.quantized import Quantized, elements, plain_g_idx
from lowbit.quantize.ranges import scale_store
from lowbit.quantize.spec import PRESETS, Channel, Group, LayerScheme, QuantSpec, scheme_from_name

from .published_layouts import (
    words,
)

INTEGER_LAYOUTS = ("compressed-tensors", "gptq", "gptq_v2", "awq")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def random_weight(
    spec: QuantSpec, shape: tuple[int, int], scale_dtype: torch.dtype, seed: int
) -> Quantized:
    """Any codes, scales (of either sign) and zero-points that `spec` allows, but zeros of 0."""
    generator = torch.Generator().manual_seed(seed)
    kind = elements(spec)
    scale_shape = spec.scale_shape(*shape)
    scale = torch.randn(scale_shape, generator=generator) * 0.1
    store = scale_store(torch.randn(shape, generator=generator), spec, scale_dtype)
    if spec.type == "float":
        values = torch.randn(shape, generator=generator) * kind.highest / 4
        codes, scale = kind.snap_(values).to(kind.dtype), scale.abs()
    else:
        low, high = int(kind.lowest), int(kind.highest) + 1
        codes = torch.randint(low, high, shape, generator=generator).to(torch.int8)
    zero = None
    if not spec.symmetric:
        lowest = int(kind.lowest) + 1
        zero = torch.randint(lowest, int(kind.highest) + 1, scale_shape, generator=generator)
        zero = zero.to(torch.int8)
    return Quantized(codes, store.encode(scale), zero, spec, store.global_scale)


def round_trip(layout: Layout, q: Quantized, scheme: LayerScheme, spec: QuantSpec) -> Quantized:
    tensors = layout.compress("m", q, scheme)
    expected = layout.tensors("m", scheme, tuple(q.codes.shape), q.scale.dtype)  # type: ignore
    for name, tensor in tensors.items():
        assert tensor.is_contiguous()
        assert (tuple(tensor.shape), tensor.dtype) == expected[name][:2], name
    again = layout.decompress("m", tensors, tensors.__getitem__, spec)
    assert torch.equal(again.codes.float(), q.codes.float())
    assert torch.equal(again.dequantize(), q.dequantize())
    return again


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(INTEGER_LAYOUTS),
    st.sampled_from([2, 3, 4, 5, 6, 7, 8]),
    st.booleans(),
    st.sampled_from([None, 32, 64]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_integer_twins_undo_each_other(
    name: str,
    num_bits: int,
    symmetric: bool,
    group_size: int | None,
    high: int,
    wide: int,
    reorder: bool,
    seed: int,
) -> None:
    layout, shape = LAYOUTS[name], (32 * high, 64 * wide)
    granularity = Channel() if group_size is None else Group(group_size)
    scheme = LayerScheme(QuantSpec(num_bits, "int", granularity, symmetric))
    if layout.refusal(scheme, shape) is not None:
        return
    q = random_weight(scheme.weights, shape, torch.float16, seed)
    if reorder and layout.writes_g_idx and scheme.weights.groups(shape[1]) > 1:
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))
        g_idx = torch.empty(shape[1], dtype=torch.int32)
        g_idx[order] = plain_g_idx(shape[1], scheme.weights)
        q = q._replace(g_idx=g_idx)
    spec = replace(scheme.weights, symmetric=False) if name == "awq" else scheme.weights
    again = round_trip(layout, q, scheme, spec)
    assert (again.g_idx is None) == (q.g_idx is None)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_in_the_native_layout(name: str) -> None:
    scheme = scheme_from_name(name)
    q = random_weight(scheme.weights, (48, 256), torch.bfloat16, 0)
    round_trip(NATIVE, q, scheme, scheme.weights)


@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (5, 7)], ids=str)
def test_fine_grained_fp8_twins_undo_each_other(shape: tuple[int, int]) -> None:
    scheme = scheme_from_name("FP8_BLOCK")
    q = random_weight(scheme.weights, shape, torch.float32, 0)
    round_trip(LAYOUTS["fp8"], q, scheme, scheme.weights)


def test_zero_words_of_symmetric_linears() -> None:
    def zeros(version: Any, num_bits: int) -> set[int]:
        spec = QuantSpec(num_bits, "int", Group(32))
        q = random_weight(spec, (32, 64), torch.float16, 0)
        stored = GPTQ(version).compress("m", q, LayerScheme(spec))["m.qzeros"]
        return {word & 0xFFFFFFFF for word in stored.flatten().tolist()}

    assert (zeros(1, 4), zeros(2, 4)) == ({0x77777777}, {0x88888888})
    assert (zeros(1, 2), zeros(2, 2)) == ({0x55555555}, {0xAAAAAAAA})
    assert (zeros(1, 8), zeros(2, 8)) == ({0x7F7F7F7F}, {0x80808080})
    assert zeros(1, 3) == {0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D}  # a stream of 0b011


def test_gptq_words_of_three_bits() -> None:
    """32 codes in 3 words: ten whole, code 10 split 2 + 1, ten whole, code 21 split 1 + 2."""
    codes = torch.full((32, 32), -4, dtype=torch.int8)  # stored 0
    codes[0, 10], codes[0, 21] = 3, 3  # stored 0b111
    scheme = LayerScheme(QuantSpec(3, "int", Group(32)))
    q = Quantized(codes, torch.ones(32, 1).half(), None, scheme.weights)
    column = GPTQ(1).compress("m", q, scheme)["m.qweight"][:, 0]
    assert [w & 0xFFFFFFFF for w in column.tolist()] == [0b11 << 30, 1 | 1 << 31, 0b11]


def test_awq_order_of_nibbles() -> None:
    """The word of outputs 0 to 7 (each storing its own number) reads, from the low nibble up,
    0 2 4 6 1 3 5 7."""
    codes = (torch.arange(8, dtype=torch.int8) - 8)[:, None].repeat(1, 32)
    scheme = LayerScheme(QuantSpec(4, "int", Group(32), symmetric=False))
    zero = torch.zeros(8, 1, dtype=torch.int8)
    q = Quantized(codes, torch.ones(8, 1).half(), zero, scheme.weights)
    tensors = LAYOUTS["awq"].compress("m", q, scheme)
    assert tensors["m.qweight"].tolist() == [[0x75316420]] * 32
    assert [w & 0xFFFFFFFF for w in tensors["m.qzeros"].flatten().tolist()] == [0x88888888]


def test_version_1_has_no_place_for_a_zero_of_0() -> None:
    scheme = LayerScheme(QuantSpec(4, "int", Group(32), symmetric=False))
    q = random_weight(scheme.weights, (32, 64), torch.float16, 0)
    assert q.zero_point is not None
    q.zero_point[3, 1] = -8  # stored 0
    with pytest.raises(UserError, match=r"'m' has zero-points of 0.*choose gptq_v2"):
        GPTQ(1).compress("m", q, scheme)
    round_trip(GPTQ(2), q, scheme, scheme.weights)
    wrapped = GPTQ(2).compress("m", q, scheme)
    wrapped["m.qzeros"][0, 0] |= 0xF
    with pytest.raises(UserError, match=r"zero-points of 16.*gptq_v2 labelled gptq"):
        GPTQ(1).decompress("m", wrapped, wrapped.__getitem__, scheme.weights)


def padded(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Signed codes in words of which each holds as many whole ones as fit."""
    half, each = 1 << (num_bits - 1), 32 // num_bits
    lines = []
    for row in codes.tolist():
        parts = [row[i : i + each] for i in range(0, len(row), each)]
        lines.append([words([c + half for c in part], num_bits)[0] for part in parts])
    return torch.tensor(lines).int()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 4, 5, 6, 7, 8]), st.integers(1, 4), st.integers(1, 70))
def test_older_padded_words_are_read(num_bits: int, rows: int, columns: int) -> None:
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(-half, half, (rows, columns), generator=generator)
    packed = padded(codes, num_bits)
    assert packed.shape[1] == padded_words(columns, num_bits)
    assert torch.equal(unpack_padded(packed, num_bits, columns).long(), codes)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("num_bits", [3, 5, 6, 7])
def test_the_number_of_words_tells_padded_from_dense(num_bits: int, symmetric: bool) -> None:
    spec = QuantSpec(num_bits, "int", Group(32), symmetric)
    q = random_weight(spec, (40, 64), torch.bfloat16, num_bits)
    dense = NATIVE.compress("m", q, LayerScheme(spec))
    older = {**dense, "m.weight_packed": padded(q.codes, num_bits)}
    if q.zero_point is not None:
        older["m.weight_zero_point"] = padded(q.zero_point.T, num_bits).T.contiguous()
    assert older["m.weight_packed"].shape != dense["m.weight_packed"].shape
    for tensors in (dense, older):
        again = NATIVE.decompress("m", tensors, tensors.__getitem__, spec)
        assert torch.equal(again.dequantize(), q.dequantize())


def test_older_column_orders_of_compressed_tensors_are_read() -> None:
    spec = QuantSpec(4, "int", Group(32))
    q = random_weight(spec, (8, 64), torch.bfloat16, 0)
    g_idx = plain_g_idx(64, spec).flip(0)
    tensors = {**NATIVE.compress("m", q, LayerScheme(spec)), "m.weight_g_idx": g_idx}
    again = NATIVE.decompress("m", tensors, tensors.__getitem__, spec)
    assert torch.equal(again.dequantize(), q._replace(g_idx=g_idx).dequantize())
    tensors["m.weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)  # not ordered
    assert NATIVE.decompress("m", tensors, tensors.__getitem__, spec).g_idx is None
    with pytest.raises(UserError, match="no longer stores"):
        NATIVE.compress("m", again, LayerScheme(spec))


# what a config says


def test_exceptions_are_told_by_patterns_that_engines_match() -> None:
    wide, layers = scheme_from_name("W8A16", 64), [f"model.layers.{i}" for i in range(2)]
    schemes = {f"{at}.mlp.down_proj": scheme_from_name("W4A16", 64) for at in layers}
    schemes |= {f"{at}.self_attn.{leaf}_proj": wide for at in layers[:1] for leaf in "qkv"}
    config = gptq_config("gptq", schemes, ["lm_head", "model.layers.0.mlp.gate"], "0", False)
    assert (config["bits"], config["group_size"], config["sym"]) == (8, 64, True)
    assert config["dynamic"] == {
        r"+:^model\.layers\.0\.mlp\.down_proj$": {"bits": 4},
        r"+:^model\.layers\.1\.mlp\.down_proj$": {"bits": 4},
        r"-:^model\.layers\.0\.mlp\.gate$": {},
    }
    assert "modules_in_block_to_quantize" not in config  # layers differ
    alike = {f"{at}.mlp.down_proj": scheme_from_name("W4A16", 64) for at in layers}
    left = [f"{at}.mlp.up_proj" for at in layers]
    partly = gptq_config("gptq", alike, left, "0", False)
    assert partly["modules_in_block_to_quantize"] == [["mlp.down_proj"]]
    more = {f"{at}.mlp.up_proj": scheme_from_name("W4A16", 64) for at in layers}
    config = gptq_config("gptq", {**schemes, **more}, [], "0", False)
    assert config["dynamic"] == {
        r"+:^model\.layers\.0\.self_attn\.(?:q_proj|k_proj|v_proj|qkv_proj)$": {"bits": 8}
    }


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}


@pytest.mark.parametrize(
    "config, name",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),  # before there was a version 2
        ({"quant_method": "gptq", "format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, None),
        ({"quant_method": "awq", "version": "gemm"}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, "gptq"),
        ({**AUTO_ROUND, "packing_format": "auto_round"}, "gptq_v2"),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, "awq"),
        ({**AUTO_ROUND, "packing_format": "auto_round", "data_type": "mx_fp"}, None),
        ({"quant_method": "bitsandbytes"}, None),
    ],
    ids=str,
)
def test_which_layout_a_config_names(config: dict[str, Any], name: str | None) -> None:
    found = find_layout(config)
    assert (None if found is None else found.name) == name
    if name is None:
        with pytest.raises(UserError, match=str(config["quant_method"])):
            layout_of(config)


@pytest.mark.parametrize(
    "name, scheme, shape, reason",
    [
        ("gptq", "W8A8", None, "how inputs are quantized"),
        ("gptq", "W5A16", None, "2, 3, 4 or 8 bits"),
        ("gptq", "FP8_BLOCK", None, "inputs"),
        ("gptq", "W4A16", (12, 128), "12 rows"),
        ("gptq", "W3A16", (64, 144), "144 columns"),
        ("gptq_v2", "W4A16", (64, 192), "groups of 128 do not divide 192"),
        ("awq", "W8A16", None, "4 bits"),
        ("awq", "W4A16", (12, 128), "12 rows"),
        ("fp8", "FP8_DYNAMIC", None, "scales of blocks"),
        ("fp8", "W4A16", None, "8-bit floats"),
        ("compressed-tensors", "W4A16", (8, 96), "groups of 128 do not divide 96"),
    ],
)
def test_what_a_layout_cannot_hold(
    name: str, scheme: str, shape: tuple[int, int] | None, reason: str
) -> None:
    why = LAYOUTS[name].refusal(scheme_from_name(scheme), shape)
    assert why is not None
    assert reason in why
