"""RMS norm and gated activations: every kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lowbit.kernels.errors import UserError
from lowbit.kernels.norm_ops import (
    NormProblem,
    choose_norm,
    gated_mul,
    gated_mul_reference,
    rms_norm,
    rms_norm_reference,
)
from lowbit.kernels.triton_ops import norms

from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")
TOLERANCE = {torch.float16: 3e-4, torch.bfloat16: 3e-3, torch.float32: 1e-6}
SHAPES = [(1, 576), (3, 100), (17, 1025), (0, 64), (2, 3, 96), (1, 1)]


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=g) * 3).to(device, dtype)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected).norm()
    limit = TOLERANCE[got.dtype] * expected.norm()
    assert error <= limit, f"{error:.2e} is more than {limit:.2e}"


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rms_norm(dtype, shape, with_residual, kernel_device):
    x = normal(*shape, dtype=dtype, device=kernel_device)
    weight = normal(shape[-1], dtype=dtype, device=kernel_device)
    residual = normal(*shape, dtype=dtype, device=kernel_device) * 2 if with_residual else None
    summed = x if residual is None else x + residual
    expected = rms_norm_reference(summed.double(), weight, 1e-5).out
    for run in (norms.rms_norm, rms_norm):
        got = run(x, weight, 1e-5, residual)
        check(got.out, expected)
        assert torch.equal(got.residual, summed)


def test_the_norm_is_torchs():
    x, weight = torch.randn(4, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    torch.testing.assert_close(
        rms_norm_reference(x, weight, 1e-6).out, F.rms_norm(x, (32,), weight, 1e-6)
    )


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 32), (3, 2100), (0, 8), (2, 3, 50)], ids=str)
def test_gated_mul(shape, gate, kernel_device):
    x = normal(*shape[:-1], 2 * shape[-1], dtype=torch.float16, device=kernel_device)
    g, u = x.double().chunk(2, -1)
    act = F.silu if gate == "silu" else lambda y: F.gelu(y, approximate=gate[5:] or "none")
    check(norms.gated_mul(x, gate), act(g) * u)
    got = gated_mul_reference(x.double(), gate)
    torch.testing.assert_close(got, act(g) * u)
    for dtype in (torch.float32, torch.bfloat16):
        y = x.cpu().to(dtype)
        check(gated_mul(y, gate, "torch_cpu"), gated_mul_reference(y.double(), gate))


def test_rows_with_strides(kernel_device):
    wide = normal(5, 300, dtype=torch.float16, device=kernel_device)
    weight = normal(64, dtype=torch.float32, device=kernel_device)
    part = wide[:, 100:164]
    assert torch.equal(
        norms.rms_norm(part, weight, 1e-5).out, norms.rms_norm(part.contiguous(), weight, 1e-5).out
    )
    assert torch.equal(norms.gated_mul(part, "silu"), norms.gated_mul(part.contiguous(), "silu"))


def test_rows_beyond_two_billion_elements(kernel_device):
    x = normal(3, 64, dtype=torch.float16, device=kernel_device)
    weight, far = normal(64, dtype=torch.float32, device=kernel_device), far_apart(x)
    near = norms.rms_norm(x, weight, 1e-5, x)
    for got, expected in zip(norms.rms_norm(far, weight, 1e-5, far), near, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(norms.gated_mul(far, "silu"), norms.gated_mul(x, "silu"))


def test_what_does_not_fit_is_named(kernel_device):
    x = normal(2, 32, dtype=torch.float16, device=kernel_device)
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(16\)?,?"):
        norms.rms_norm(x, x[0, :16], 1e-5)
    with pytest.raises(ValueError, match="residual is float32, not float16"):
        norms.rms_norm(x, x[0], 1e-5, x.float())
    with pytest.raises(ValueError, match=r"gate_up has shape \(2, 31\), not \(any, 30\)"):
        norms.gated_mul(x[:, :31], "silu")


def test_who_runs():
    problem = NormProblem("rms_norm", 64, torch.float32, "cpu")
    assert choose_norm(problem).candidate.name == "torch_cpu"
    with pytest.raises(UserError, match="runs on cuda, not cpu"):
        choose_norm(problem, "triton")
    with pytest.raises(UserError, match="rows of at most 32768, not 65536"):
        choose_norm(problem._replace(width=65536, device="cuda"), "triton")
    with pytest.raises(UserError, match="not torch.float64"):
        choose_norm(problem._replace(dtype=torch.float64, device="cuda"), "triton")
