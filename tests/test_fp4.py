"""4-bit floats times 4-bit floats: the product by its definition, and who runs it where."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.linear_fp4 import FP4, pack_fp4, run_fp4
from lowbit.kernels.linear_ops import LinearOperands, LinearProblem, choose_linear, linear_reference
from lowbit.kernels.triton_ops.fp4_gemm import FP4Config, fp4_gemm
from lowbit.quantize.activations import activation_format
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.spec import PRESETS, Group

from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")
interpreted_only = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 10,
    reason="a GPU without 4-bit tensor cores",
)


def made(scheme: str, device: torch.device) -> tuple[LinearOperands, LinearProblem]:
    spec = PRESETS[scheme].weights
    assert isinstance(spec.granularity, Group)
    fmt = activation_format(PRESETS[scheme].input_activations)
    w = torch.randn(70, 256, generator=torch.Generator().manual_seed(0))
    q = rtn_quantize(w.to(device), spec, torch.bfloat16)
    p = LinearProblem(
        4, spec.granularity.size, True, 256, 70, torch.float16, "cuda", "float", fmt
    )  # fmt: skip
    given = torch.tensor([300.0], device=device) if fmt.takes_scale else None
    return LinearOperands(q.codes, q.scale, None, q.global_scale, given), p


@interpreted_only
@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP4"])
def test_the_product_is_the_reference(kernel_device, scheme):
    operands, p = made(scheme, kernel_device)
    tensors = pack_fp4(operands, p)
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(70, generator=g).to(kernel_device, p.dtype)
    for rows in (0, 1, 3, 17):
        x = torch.randn(rows, 256, generator=g).to(kernel_device, p.dtype)
        y = run_fp4(x, tensors, bias, p)
        assert y.shape == (rows, 70) and y.dtype == p.dtype
        if rows:
            want = linear_reference(x.float(), operands, bias.float(), p)
            assert (y.float() - want).norm() < 1e-3 * want.norm()


@interpreted_only
def test_rows_at_strides_and_beyond_two_billion_elements(kernel_device):
    operands, p = made("MXFP4", kernel_device)
    w, w_scale, one, _ = pack_fp4(operands, p)
    x, x_scale, config = w[:3], w_scale[:3], FP4Config(16, 64, 4, 2)
    expected = fp4_gemm(x, x_scale, w, w_scale, one, None, torch.float16, config)
    wide = torch.cat([x, x, x], 1)[:, 128:256]
    for rows in (wide, far_apart(x)):
        y = fp4_gemm(rows, x_scale, w, w_scale, one, None, torch.float16, config)
        assert torch.equal(y, expected)


def test_without_such_tensor_cores_weights_are_dequantized_when_loaded():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    _, p = made("NVFP4", torch.device("cpu"))
    choice = choose_linear(p)
    assert choice.candidate.name == "dense"
    assert "compute capability 10" in choice.declined["fp4"]
    for changes, reason in [
        ({"num_bits": 8}, "holds 4-bit floats"),
        ({"activation": None}, "takes inputs quantized to 4-bit floats"),
        ({"group_size": 32}, "NVFP4's groups of 16 or MXFP4's of 32"),
        ({"in_features": 192}, "in_features must be a multiple of 128, not 192"),
        ({"device": "cpu"}, "runs on cuda, not cpu"),
    ]:
        declined = FP4.decline(p._replace(**changes))
        assert declined is not None and reason in declined


def test_wrong_operands_are_named(kernel_device):
    operands, p = made("MXFP4", kernel_device)
    w, w_scale, one, _ = pack_fp4(operands, p)
    x, x_scale = w[:3], w_scale[:3]
    config = FP4Config(16, 64, 4, 2)

    def refused(message: str, x=x, x_scale=x_scale, w=w, w_scale=w_scale, dtype=torch.float16):
        with pytest.raises(ValueError, match=message):
            fp4_gemm(x, x_scale, w, w_scale, one, None, dtype, config)

    refused("x is float16, not uint8", x=x.half())
    refused("K must be a multiple of 128, not 248", x=x[:, :124])
    refused(r"w has shape \(70, 64\)", w=w[:, :64].contiguous())
    refused(r"x_scale has shape \(2, 8\), not \(3, 8\)", x_scale=x_scale[:2])
    refused("x_scale is float8_e4m3fn, not uint8", x_scale=x_scale.to(torch.float8_e4m3fn))
    refused("makes float16, bfloat16 or float32, not torch.int8", dtype=torch.int8)
