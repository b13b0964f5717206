"""8-bit activations on a GPU: quantizing them, alone and fused, and multiplying the codes."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.a8_forms import BLOCK_N, a8_config, pinned_config
from lowbit.kernels.a8_layout import A8Weight, pack_halves, unpack_halves
from lowbit.kernels.activations import ActivationFormat, quantize_activation
from lowbit.kernels.elements import E4M3, int_elements
from lowbit.kernels.linear_a8 import A8, pack_a8
from lowbit.kernels.linear_ops import LinearOperands, LinearProblem, choose_linear, linear_reference
from lowbit.kernels.norm_ops import gated_mul_reference, rms_norm_reference
from lowbit.kernels.triton_ops.a8_gemm import a8_gemm
from lowbit.kernels.triton_ops.act_quant import act_quant, rms_norm_quant, silu_mul_quant
from lowbit.kernels.triton_ops.tiles import GemmConfig

from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")
INT8, FP8 = ActivationFormat(int_elements(8)), ActivationFormat(E4M3)
FP8_BLOCK = ActivationFormat(E4M3, 128)
STATIC = ActivationFormat(int_elements(8), static=True)
FORMATS = {"int8": INT8, "fp8": FP8, "fp8 block": FP8_BLOCK, "int8 static": STATIC}
CONFIG = GemmConfig(16, BLOCK_N, 2, 4, 2)


def numbers(*shape: int, device, dtype=torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def given_scale(fmt: ActivationFormat, device) -> torch.Tensor | None:
    return torch.tensor([0.02], device=device) if fmt.static else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_are_the_definitions(kernel_device, name, dtype):
    fmt = FORMATS[name]
    for rows, columns in ((1, 128), (3, 100), (17, 640), (2, 7)):
        wide = numbers(rows, columns + 9, device=kernel_device, dtype=dtype, seed=rows)
        x = wide[:, 5 : 5 + columns]
        x[0, : min(columns, 128)] = 0  # a whole group of zeros: its scale is 1
        scale = given_scale(fmt, kernel_device)
        got = act_quant(x, fmt, scale)
        codes, scales = quantize_activation(x, fmt, scale)
        assert got.codes.dtype == fmt.elements.dtype and got.scales.dtype == torch.float32
        assert torch.equal(got.codes.float(), codes) and torch.equal(got.scales, scales)


def close_codes(got, x: torch.Tensor, fmt: ActivationFormat) -> None:
    """Codes and scales of x, which was computed in another order: a few codes may round the other
    way, by one step."""
    codes, scales = quantize_activation(x, fmt, None)
    torch.testing.assert_close(got.scales, scales, rtol=1e-5, atol=0)
    step = (got.codes.float() - codes).abs() / codes.abs().clamp(min=8)
    assert step.max() <= 0.13 and (step > 0).float().mean() < 0.01


@pytest.mark.parametrize("fmt", [INT8, FP8, FP8_BLOCK], ids=str)
def test_rms_norm_and_silu_are_fused(kernel_device, fmt):
    x, residual = (numbers(5, 256, device=kernel_device, seed=s) for s in (1, 2))
    weight = numbers(256, device=kernel_device, seed=3)
    normed = rms_norm_reference(x.float(), weight, 1e-5).out
    close_codes(rms_norm_quant(x, weight, 1e-5, fmt), normed, fmt)
    total = x + residual
    got = rms_norm_quant(x, weight, 1e-5, fmt, residual)
    assert torch.equal(residual, total), "the residual is overwritten by the sum"
    close_codes(got, rms_norm_reference(total.float(), weight, 1e-5).out, fmt)
    gate_up = torch.cat([x, residual], dim=-1)
    gate, up = gate_up.chunk(2, dim=-1)
    close_codes(silu_mul_quant(gate, up, fmt), gated_mul_reference(gate_up.float(), "silu"), fmt)


def test_wrong_activations_are_named(kernel_device):
    x = numbers(2, 64, device=kernel_device)
    for message, call in {
        r"x has shape \(64,\)": lambda: act_quant(x[0], INT8),
        "x is int8": lambda: act_quant(x.to(torch.int8), INT8),
        "a static format takes a scale": lambda: act_quant(x, STATIC),
        "no other does": lambda: act_quant(x, INT8, torch.ones(1, device=x.device)),
        r"up has shape \(1, 64\), not \(2, 64\)": lambda: silu_mul_quant(x, x[:1], INT8),
        r"weight has shape \(32\)|weight has shape \(32,\)": lambda: rms_norm_quant(
            x, x[0, :32], 1e-5, INT8
        ),
        "at most 32768 fit": lambda: act_quant(x.new_empty(1, 40000), INT8),
        "groups must be a power of two": lambda: act_quant(x, ActivationFormat(E4M3, 48)),
        "makes float32 scales": lambda: act_quant(
            x, ActivationFormat(E4M3, 32, scale_dtype=torch.uint8)
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert act_quant(x[:0], INT8).codes.shape == (0, 64)


@pytest.mark.parametrize("columns", [1, 64, 100, 128, 300])
def test_halves_round_trip(columns):
    g = torch.Generator().manual_seed(columns)
    codes = torch.randint(-8, 8, (3, columns), generator=g, dtype=torch.int8)
    packed = pack_halves(codes)
    assert packed.numel() == 3 * 64 * -(-columns // 128)
    assert torch.equal(unpack_halves(packed, columns), codes)


def test_hand_written_halves():
    codes = torch.zeros(1, 128, dtype=torch.int8)
    codes[0, 3], codes[0, 67] = -1, 7
    assert pack_halves(codes)[0, 0, 3] == 0x7F and pack_halves(codes).count_nonzero() == 1


def problem(**changes) -> LinearProblem:
    plain = LinearProblem(8, 256, True, 256, 72, torch.float16, "cuda", "int", INT8)
    return plain._replace(**changes)


PROBLEMS = {
    "W8A8": problem(),
    "W8A8 static": problem(activation=STATIC),
    "FP8": problem(kind="float", activation=FP8),
    "FP8 block": problem(kind="float", activation=FP8_BLOCK, group_size=128),
    "W4A8": problem(num_bits=4, group_size=128),
    "W4A8 g64": problem(num_bits=4, group_size=64, in_features=320),
    "W4A8 channel": problem(num_bits=4),
}


def operands(p: LinearProblem, device) -> LinearOperands:
    g = torch.Generator().manual_seed(7)
    shape, half = (p.out_features, p.in_features), 1 << (p.num_bits - 1)
    if p.kind == "int":
        codes = torch.randint(-half, half, shape, generator=g, dtype=torch.int8)
    else:
        codes = (3 * torch.randn(shape, generator=g)).to(torch.float8_e4m3fn)
    groups = -(-p.in_features // p.group_size)
    scale = (torch.rand(p.out_features, groups, generator=g) + 0.5).to(device) * 0.01
    assert p.activation is not None
    return LinearOperands(
        codes.to(device), scale, input_scale=given_scale(p.activation, device)
    )  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_linear_kernel_is_the_reference(kernel_device, name):
    p = PROBLEMS[name]
    assert choose_linear(p).candidate is A8
    weight = operands(p, kernel_device)
    bias = numbers(p.out_features, device=kernel_device, seed=4)
    for rows in (0, 1, 3, 17):
        x = numbers(rows, p.in_features, device=kernel_device, seed=rows)
        y = A8.run(x, A8.pack(weight, p), bias, p)
        assert y.shape == (rows, p.out_features) and y.dtype == p.dtype
        if rows:
            assert p.activation is not None
            want = linear_reference(x.float(), weight, bias.float(), p)
            error = (y.float() - want).abs().max() / want.abs().max()
            assert error < 2**-10, error


@pytest.mark.parametrize("columns", [128, 208, 640])
def test_whole_numbers_are_summed_exactly(kernel_device, columns):
    g = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-128, 128, (n, columns), generator=g, dtype=torch.int8) for n in (5, 70))
    one = torch.ones(1, 70, device=kernel_device)
    locks = torch.zeros(128, dtype=torch.int32, device=kernel_device)
    weight = A8Weight(w.to(kernel_device), one, locks)
    scale = torch.ones(1, device=kernel_device)
    y = a8_gemm(x.to(kernel_device), scale, weight, None, 0, torch.float32, CONFIG)
    assert torch.equal(y.cpu().long(), x.long() @ w.long().T) and not locks.any()


def test_rows_at_strides_and_beyond_two_billion_elements(kernel_device):
    p = problem()
    weight = pack_a8(operands(p, kernel_device), p)
    x = numbers(3, 256, device=kernel_device)
    near, far = act_quant(x, INT8), act_quant(far_apart(x), INT8)
    assert torch.equal(near.codes, far.codes) and torch.equal(near.scales, far.scales)
    expected = a8_gemm(near.codes, near.scales, weight, None, 0, p.dtype, CONFIG)
    wide = near.codes.new_full((3, 600), 5)
    wide[:, 16:272] = near.codes
    for codes in (wide[:, 16:272], far_apart(near.codes)):
        y = a8_gemm(codes, near.scales, weight, None, 0, p.dtype, CONFIG)
        assert torch.equal(y, expected)


@pytest.mark.parametrize("name", ["W8A8", "FP8 block", "W4A8"])
def test_a_token_has_the_same_bits_in_every_batch(kernel_device, name):
    p = PROBLEMS[name]._replace(in_features=512, group_size=PROBLEMS[name].group_size // 256 * 512
                                or 128)  # fmt: skip
    weight, size = pack_a8(operands(p, kernel_device), p), p.group_size % 512
    assert p.activation is not None
    codes, scales = act_quant(numbers(19, 512, device=kernel_device), p.activation)
    configs = {a8_config(r, 72, 4, False, 90) for r in (1, 16)} | {pinned_config(72, 4, False, 90)}
    assert len(configs) == 2
    for config in configs:
        whole = a8_gemm(codes, scales, weight, None, size, p.dtype, config)
        for rows in (slice(0, 1), slice(16, 19)):
            some = a8_gemm(codes[rows], scales[rows], weight, None, size, p.dtype, config)
            assert torch.equal(some, whole[rows])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "runs on cuda, not cpu"),
        ({"activation": None}, "takes inputs quantized to 8 bits"),
        ({"activation": FP8}, "multiplies float8 with its like, not with int"),
        ({"symmetric": False}, "has no zero-point"),
        ({"num_bits": 3}, "takes weights of 8 bits, or whole numbers of 4, not 3"),
        ({"group_size": 64}, "takes groups of a multiple of 128 columns, not 64"),
        ({"in_features": 1 << 17, "group_size": 1 << 17}, "at most 32768 columns"),
        ({"in_features": 40, "group_size": 40}, "40 columns are no multiple of 16"),
        ({"kind": "float", "activation": FP8_BLOCK}, "beside weights' of as many"),
    ],
    ids=str,
)
def test_reasons_to_decline(changes, reason):
    declined = A8.decline(problem(**changes))
    assert declined is not None and reason in declined


def test_wrong_operands_are_named(kernel_device):
    p = problem()
    weight = pack_a8(operands(p, kernel_device), p)
    x, scale = act_quant(numbers(3, 256, device=kernel_device), INT8)

    def refused(message: str, x=x, scale=scale, group=0, dtype=torch.float16, bias=None, **parts):
        with pytest.raises(ValueError, match=message):
            a8_gemm(x, scale, weight._replace(**parts), bias, group, dtype, CONFIG)

    refused("x is float16", x=x.half())
    refused(r"codes has shape \(72, 256\), not \(72, 128\)", x=x[:, :128].contiguous())
    refused("codes is float8_e4m3fn, not int8", codes=weight.codes.to(torch.float8_e4m3fn))
    refused(r"scale has shape \(1, 72\), not \(2, 72\)", group=128)
    refused(r"x_scale has shape \(2, 1\), not \(1\), \(3, 1\)", scale=scale[:2])
    refused("x_scale is torch.float16, not float32", scale=scale.half())
    refused("bias is int8", bias=x[0, :72])
    refused("makes float16, bfloat16 or float32", dtype=torch.int8)
    refused("takes groups of a multiple of 128 columns, not 64", group=64)
