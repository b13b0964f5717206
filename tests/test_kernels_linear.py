"""Packed linear kernels against the reference, and the dispatch table's reasons."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels import linear_dequant, linear_int4
from lowbit.kernels.activations import fake_quantize_activation, quantize_activation
from lowbit.kernels.bitplanes import pack_planes, plane_widths, unpack_planes
from lowbit.kernels.elements import elements_of, int_elements
from lowbit.kernels.errors import UserError
from lowbit.kernels.linear_ops import (
    LinearOperands,
    LinearProblem,
    choose_linear,
    dense_weight,
    linear_kernels,
    linear_reference,
)
from lowbit.kernels.linear_w4a8 import by_rows
from lowbit.quantize.activations import activation_format
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.spec import PRESETS

KERNELS = {k.name: k for k in linear_kernels()}


def int_range(num_bits: int) -> tuple[int, int]:
    codes = int_elements(num_bits)
    return int(codes.lowest), int(codes.highest)


def problem(**changes) -> LinearProblem:
    plain = LinearProblem(4, 64, True, 128, 48, torch.bfloat16, "cpu")
    return plain._replace(**changes)


def random_weight(p: LinearProblem, seed: int = 0) -> LinearOperands:
    g = torch.Generator().manual_seed(seed)
    groups = -(-p.in_features // p.group_size)
    if p.kind == "int":
        qmin, qmax = int_range(p.num_bits)
        codes = torch.randint(
            qmin, qmax + 1, (p.out_features, p.in_features), generator=g, dtype=torch.int8
        )
    else:
        elements = elements_of("float", p.num_bits)
        codes = elements.snap_(torch.randn(p.out_features, p.in_features, generator=g) * 3)
        codes = codes.to(elements.dtype)
    scale = (torch.rand(p.out_features, groups, generator=g) + 0.5) * 0.01
    scale = scale.to(torch.bfloat16)  # so that no kernel rounds it further
    zero = None
    if not p.symmetric:
        zero = torch.randint(
            qmin, qmax + 1, (p.out_features, groups), generator=g, dtype=torch.int8
        )
    static = p.activation is not None and p.activation.takes_scale
    return LinearOperands(codes, scale, zero, None, torch.tensor([0.03]) if static else None)


def run(name: str, p: LinearProblem, rows: tuple[int, ...], with_bias: bool, seed: int = 0):
    """(kernel's y, reference y with the same weights, what they were made of)."""
    operands = random_weight(p, seed)
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(*rows, p.in_features, generator=g).to(p.dtype)
    bias = torch.randn(p.out_features, generator=g).to(p.dtype) if with_bias else None
    kernel = KERNELS[name]
    assert kernel.decline(p) is None
    given = x
    if p.activation is not None and not kernel.quantizes_input:
        given = fake_quantize_activation(x, p.activation, operands.input_scale)
    y = kernel.run(given, kernel.pack(operands, p), bias, p)
    assert y.dtype == p.dtype and y.shape == (*rows, p.out_features)
    return y, linear_reference(x, operands, bias, p), (x, operands, bias)


def exactly(x, operands, bias, p: LinearProblem) -> torch.Tensor:
    """The reference computed in float32."""
    bias = None if bias is None else bias.float()
    return linear_reference(x.float(), operands, bias, p)


@settings(deadline=None, max_examples=60)
@given(bits=st.integers(1, 8), rows=st.integers(1, 5), columns=st.integers(1, 70), data=st.data())
def test_planes_round_trip(bits, rows, columns, data):
    qmin, qmax = int_range(bits)
    seed = data.draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(qmin, qmax + 1, (rows, columns), generator=g, dtype=torch.int8)
    packed = pack_planes(codes, bits)
    assert packed.shape == (rows, -(-columns // 8) * bits)
    unsigned = unpack_planes(packed, bits, columns)
    assert torch.equal(unsigned.to(torch.int16) - (1 << (bits - 1)), codes.to(torch.int16))


def test_planes_hand_written_row():
    """3 bits, u = 0..7: the low two bits of 0, 2, 4, 6, then of 1, 3, 5, 7, then the high bits."""
    codes = torch.arange(8, dtype=torch.int8).view(1, 8) - 4
    assert plane_widths(3) == [2, 1]
    low_even = 0 | 2 << 2 | 0 << 4 | 2 << 6
    low_odd = 1 | 3 << 2 | 1 << 4 | 3 << 6
    assert pack_planes(codes, 3).tolist() == [[low_even, low_odd, 0b11110000]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_dequant_kernel_equals_the_reference_exactly(bits, symmetric, dtype):
    for out, columns, group in ((48, 128, 64), (7, 36, 12), (33, 40, 40), (1, 8, 1)):
        p = problem(
            num_bits=bits, symmetric=symmetric, dtype=dtype, out_features=out,
            in_features=columns, group_size=group,
        )  # fmt: skip
        for rows in ((1,), (5,), (2, 3)):
            y, reference, _ = run("dequant", p, rows, with_bias=True, seed=bits)
            assert torch.equal(y, reference), (p, rows, (y - reference).abs().max())


def test_dequant_in_row_chunks_equals_whole(monkeypatch):
    p = problem(num_bits=3, out_features=50, dtype=torch.float32)
    y, reference, _ = run("dequant", p, (4,), with_bias=True)
    monkeypatch.setattr(linear_dequant, "CHUNK_WEIGHTS", 128 * 7)
    chunked, _, _ = run("dequant", p, (4,), with_bias=True)
    torch.testing.assert_close(chunked, reference, atol=1e-5, rtol=1e-5)
    assert chunked.shape == y.shape


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_int4_kernel_is_the_reference_in_bf16(group, symmetric, with_bias):
    for out in (16, 48, 128):
        p = problem(symmetric=symmetric, group_size=group, in_features=256, out_features=out)
        for rows in ((1,), (5,), (2, 40)):
            y, _, made_of = run("int4pack_cpu", p, rows, with_bias)
            exact = exactly(*made_of, p)
            # bf16 weights, a bf16 product and a bf16 sum with the bias: half an ulp, 2^-9, each
            tolerance = 3 * 2**-9 * exact.abs().max() + 2**-9
            assert (y.float() - exact).abs().max() < tolerance


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int4pack_dequantizes_for_many_rows(symmetric, group_size, with_bias) -> None:
    """As the definition does: the weight is rounded once, or twice where it has zero-points."""
    p = problem(symmetric=symmetric, group_size=group_size, out_features=192)
    y, reference, made_of = run("int4pack_cpu", p, (2, linear_int4.MAX_ROWS), with_bias)
    exact = exactly(*made_of, p)
    error = (y.float() - exact).norm() / exact.norm()
    assert error < 2 * (reference.float() - exact).norm() / exact.norm()
    few = KERNELS["int4pack_cpu"].run(
        made_of[0][:1], KERNELS["int4pack_cpu"].pack(made_of[1], p), made_of[2], p
    )
    assert (y[:1] - few).float().norm() < 0.01 * few.float().norm()


def test_int4_kernel_rows_do_not_depend_on_the_batch():
    p = problem()
    kernel = KERNELS["int4pack_cpu"]
    tensors = kernel.pack(random_weight(p), p)
    x = torch.randn(9, p.in_features, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = kernel.run(x, tensors, None, p)
    for i in range(9):
        assert torch.equal(kernel.run(x[i : i + 1], tensors, None, p)[0], whole[i])


@pytest.mark.parametrize("rows", [(1,), (3, 2), (200,)], ids=str)
def test_int8_kernel_is_the_reference_in_bf16(rows):
    for out, columns in ((48, 128), (7, 32), (100, 64)):
        p = problem(num_bits=8, group_size=columns, in_features=columns, out_features=out)
        y, _, made_of = run("int8pack_cpu", p, rows, with_bias=True)
        exact = exactly(*made_of, p)
        assert (y.float() - exact).abs().max() < 2**-7 * exact.abs().max()


TOKEN_INT8 = activation_format(PRESETS["W8A8"].input_activations)
STATIC_INT8 = activation_format(PRESETS["W8A8_STATIC"].input_activations)
INPUTS = {n: activation_format(s.input_activations) for n, s in PRESETS.items()
          if s.input_activations}  # fmt: skip
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="CPU without VNNI")


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [TOKEN_INT8, STATIC_INT8], ids=str)
def test_w8a8_is_the_integer_product_exactly(activation, dtype):
    """Sums in whole numbers, then the scale of the row, then that of the token, then the bias."""
    for out, columns, rows in ((48, 128, (5,)), (7, 33, (2, 3)), (64, 2048, (1,)), (16, 64, (0,))):
        p = problem(num_bits=8, group_size=columns, in_features=columns, out_features=out,
                    dtype=dtype, activation=activation)  # fmt: skip
        y, _, (x, operands, bias) = run("w8a8_cpu", p, rows, with_bias=True)
        codes, scales = quantize_activation(x, activation, operands.input_scale)
        sums = codes.to(torch.int64) @ operands.codes.to(torch.int64).T
        want = sums.float() * operands.scale.float().reshape(-1) * scales + bias
        assert torch.equal(y, want.to(dtype))


@needs_vnni
def test_w8a8_is_the_reference_up_to_float_rounding():
    p = problem(num_bits=8, group_size=256, in_features=256, dtype=torch.float32,
                activation=TOKEN_INT8)  # fmt: skip
    y, reference, _ = run("w8a8_cpu", p, (3, 5), with_bias=True)
    torch.testing.assert_close(y, reference, atol=1e-5, rtol=1e-5)
    in_bf16, _, made_of = run("w8a8_cpu", p._replace(dtype=torch.bfloat16), (3, 5), with_bias=True)
    exact = exactly(*made_of, p)
    assert (in_bf16.float() - exact).abs().max() < 2**-8 * exact.abs().max()


@needs_vnni
def test_w8a8_tokens_do_not_depend_on_the_batch():
    p = problem(num_bits=8, group_size=128, activation=TOKEN_INT8)
    kernel = KERNELS["w8a8_cpu"]
    tensors = kernel.pack(random_weight(p), p)
    x = torch.randn(9, p.in_features, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = kernel.run(x, tensors, None, p)
    for i in range(9):
        assert torch.equal(kernel.run(x[i : i + 1], tensors, None, p)[0], whole[i])


def test_w4a8_runs_only_where_it_is_named():
    assert "w4a8_cpu" in KERNELS
    for changes in ({}, {"dtype": torch.float32}, {"symmetric": False}):
        choice = choose_linear(problem(**changes))
        assert choice.candidate.name != "w4a8_cpu" and "w4a8_cpu" not in choice.declined
    for changes, why in (
        ({"batch_invariant": True}, "in some batches"),
        ({"activation": TOKEN_INT8}, "does not quantize"),
        ({"num_bits": 3}, "4-bit"),
    ):
        with pytest.raises(UserError, match=why):
            choose_linear(problem(**changes), "w4a8_cpu")


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_w4a8_is_the_product_of_rounded_numbers(symmetric, monkeypatch):
    """One column far above the others: no pair of products saturates where there is no VNNI."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    p = problem(symmetric=symmetric, out_features=64)
    operands = random_weight(p)
    operands.codes[:] = operands.codes % 3 - 1
    operands.codes[:, 0], operands.codes[:, 1] = 7, 0
    operands.scale[:, 1:] = operands.scale[:, :1] * 1.5  # the second group's
    if operands.zero_point is not None:
        operands.zero_point.clamp_(0, 0)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    kernel = KERNELS["w4a8_cpu"]
    tensors = kernel.pack(operands, p)
    rounded = by_rows(operands, p)
    w = rounded.codes.float() * rounded.scale
    assert (w - dense_weight(operands, p, torch.float32)).abs().max() <= rounded.scale.max() / 2
    want = fake_quantize_activation(x.float(), TOKEN_INT8, None) @ w.T
    got = kernel.run(x, tensors, None, p)
    assert (got.float() - want).abs().max() < 2**-7 * want.abs().max()
    few = kernel.run(x[:7], tensors, None, p)  # as int4pack
    assert torch.equal(few, KERNELS["int4pack_cpu"].run(x[:7], tensors[:2], None, p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["dense", "dequant"])
@pytest.mark.parametrize("bits", [4, 8])
def test_float_codes_equal_the_reference(bits, kernel, dtype):
    for out, columns, group in ((48, 128, 16), (7, 96, 32), (33, 200, 128), (5, 64, 64)):
        p = problem(num_bits=bits, kind="float", dtype=dtype, out_features=out,
                    in_features=columns, group_size=group)  # fmt: skip
        for rows in ((1,), (2, 3)):
            y, reference, _ = run(kernel, p, rows, with_bias=True, seed=bits)
            if kernel == "dense":  # the product is another library's
                torch.testing.assert_close(y, reference)
            else:
                assert torch.equal(y, reference), (p, rows)


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP4", "MXFP8"])
@pytest.mark.parametrize("kernel", ["dense", "dequant"])
def test_scales_of_8_bits_are_kept_as_stored(scheme, kernel):
    spec = PRESETS[scheme].weights
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    q = rtn_quantize(w, spec, torch.bfloat16)
    p = problem(num_bits=spec.num_bits, kind="float", group_size=spec.granularity.size,
                in_features=64, out_features=24, dtype=torch.float32)  # fmt: skip
    tensors = KERNELS[kernel].pack(LinearOperands(q.codes, q.scale, None, q.global_scale), p)
    y = KERNELS[kernel].run(torch.eye(64), tensors, None, p)
    assert torch.equal(y.T, q.dequantize())
    if kernel == "dequant":
        rows = 24 * 4 if q.global_scale is not None else 0  # the global scale, once a row
        assert (
            sum(t.nbytes for t in tensors) == 24 * 64 * spec.num_bits // 8 + q.scale.numel() + rows
        )


@pytest.mark.parametrize("scheme", INPUTS)
def test_inputs_are_quantized_before_a_kernel_that_does_not(scheme):
    p = problem(num_bits=3, dtype=torch.float32, activation=INPUTS[scheme])
    y, reference, (x, operands, bias) = run("dequant", p, (4,), with_bias=True)
    assert torch.equal(y, reference)
    plain = linear_reference(x, operands, bias, p._replace(activation=None))
    assert not torch.equal(y, plain)


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        pytest.param(
            {"num_bits": 8, "group_size": 128, "activation": TOKEN_INT8},
            "w8a8_cpu",
            marks=needs_vnni,
        ),
        pytest.param(
            {"num_bits": 4, "group_size": 128, "activation": STATIC_INT8, "dtype": torch.float32},
            "w8a8_cpu",
            marks=needs_vnni,
        ),
        ({"activation": TOKEN_INT8}, "int4pack_cpu"),
        ({"activation": INPUTS["FP8_DYNAMIC"]}, "int4pack_cpu"),
        ({"num_bits": 8, "group_size": 128, "activation": INPUTS["FP8_BLOCK"]}, "int8pack_cpu"),
        ({"num_bits": 8, "kind": "float", "activation": INPUTS["FP8"]}, "dense"),
        ({"kind": "float", "group_size": 16}, "dense"),
        ({"in_features": 160, "group_size": 128}, "dequant"),
        ({}, "int4pack_cpu"),
        ({"symmetric": False}, "int4pack_cpu"),
        ({"dtype": torch.float32}, "dequant"),
        ({"group_size": 16}, "dequant"),
        ({"out_features": 40}, "dequant"),
        ({"num_bits": 3}, "dequant"),
        ({"num_bits": 8}, "dequant"),
        ({"num_bits": 8, "group_size": 128}, "int8pack_cpu"),
        ({"num_bits": 8, "group_size": 128, "symmetric": False}, "dequant"),
        ({"num_bits": 8, "group_size": 40, "in_features": 40}, "dequant"),
        ({"device": "cuda"}, "wna16"),
        ({"device": "cuda", "num_bits": 3, "symmetric": False}, "wna16"),
        ({"device": "cuda", "group_size": 128, "activation": TOKEN_INT8}, "a8"),
        ({"device": "cuda", "group_size": 32, "activation": TOKEN_INT8}, "wna16"),
        ({"device": "cuda", "group_size": 96, "in_features": 192}, "dequant"),
        ({"device": "cuda", "num_bits": 5}, "dequant"),
        ({"device": "cuda", "dtype": torch.float32}, "dequant"),
        ({"device": "cuda", "batch_invariant": True}, "wna16"),
        ({"batch_invariant": True}, "int4pack_cpu"),
        ({"batch_invariant": True, "num_bits": 8, "group_size": 128}, "dequant"),
        ({"batch_invariant": True, "dtype": torch.float32}, "dequant"),
    ],
    ids=str,
)
def test_table_takes_the_first_that_accepts_and_keeps_the_reasons(changes, kernel):
    choice = choose_linear(problem(**changes))
    assert choice.candidate.name == kernel
    names = [k.name for k in linear_kernels()]
    assert list(choice.declined) == names[: names.index(kernel)]
    assert all(choice.declined.values())


def test_forcing_a_kernel():
    assert choose_linear(problem(), force="dequant").candidate.name == "dequant"
    with pytest.raises(UserError, match="out_features must be a multiple of 16, not 40"):
        choose_linear(problem(out_features=40), force="int4pack_cpu")
    with pytest.raises(UserError, match="unknown linear kernel 'marlin'.*dequant"):
        choose_linear(problem(), force="marlin")
