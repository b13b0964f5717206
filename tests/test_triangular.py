"""Matrices changed in place: the same as torch's own functions give, without a second matrix."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from lowbit.calib.statistics import Hessian, InputShift
from lowbit.kernels.finite import all_finite
from lowbit.kernels.triangular import (
    BLOCK,
    cholesky_,
    invert_lower_,
    mirror_upper_,
    reordered,
    reverse_,
)
from lowbit.quantize.passes.gptq import factor_hessian
from lowbit.quantize.passes.settings import GPTQSettings
from torch import Tensor

SIZES = [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 100]


def gram(n: int) -> Tensor:
    x = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(n))
    return x.T @ x / len(x) + 0.1 * torch.eye(n)


@pytest.mark.parametrize("n", SIZES)
def test_factors_where_the_matrix_lay(n: int) -> None:
    h = gram(n)
    expected = torch.linalg.cholesky(h)
    place = h.data_ptr()
    assert cholesky_(h)
    assert h.data_ptr() == place and torch.equal(h, h.tril())
    assert torch.allclose(h, expected, rtol=1e-5, atol=1e-6)


def test_no_factor_where_there_is_none() -> None:
    h = gram(8)
    h[3, 3] = -1
    assert not cholesky_(h)


@pytest.mark.parametrize("n", SIZES)
def test_inverts_a_lower_triangle(n: int) -> None:
    lower = torch.linalg.cholesky(gram(n))
    inverse = invert_lower_(lower.clone())
    assert torch.equal(inverse, inverse.tril())
    exact = torch.linalg.inv(lower.double())
    assert (inverse - exact).norm() < 3e-6 * exact.norm()


@pytest.mark.parametrize("n", SIZES)
def test_moves_entries(n: int) -> None:
    m = torch.randn(n, n, generator=torch.Generator().manual_seed(n))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    assert torch.equal(reordered(m, order), m[order][:, order])
    assert torch.equal(reverse_(m.clone()), m.flip(0, 1))
    assert torch.equal(mirror_upper_(m.clone()), m.triu() + m.triu(1).T)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finds_one_value_that_is_not_finite(value: float, dtype: torch.dtype) -> None:
    x = torch.randn(33, 65).to(dtype)
    assert all_finite(x) and all_finite(x[:0])
    x[-1, -1] = value
    assert not all_finite(x)


def test_a_mean_is_made_once_of_the_sum() -> None:
    x, other = torch.randn(2, 40, 12).unbind(0)
    hessian, shift = Hessian(12), InputShift(12)
    hessian.add(x)
    shift.add_pair(x, other)
    assert torch.allclose(hessian.mean(), x.T @ x / 40, atol=1e-6)
    assert torch.allclose(shift.mean(), (other - x).T @ x / 40, atol=1e-6)
    assert hessian.mean() is hessian.mean() and shift.mean() is shift.mean()
    with pytest.raises(AssertionError, match="has become the mean"):
        hessian.add(x)
    with pytest.raises(AssertionError, match="has become the mean"):
        shift.add_pair(x, other)


@pytest.mark.skipif(sys.platform != "linux", reason="a peak is measured anew through /proc")
def test_a_hessian_is_factored_in_one_matrix_more() -> None:
    n = 2048
    hessian = Hessian(n)
    hessian.add(torch.randn(3 * n, n))
    factor_hessian(torch.eye(BLOCK), GPTQSettings())  # what is loaded at the first call
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    factor = factor_hessian(hessian.mean(), GPTQSettings())
    assert factor.u.shape == (n, n)
    assert resident("VmHWM") - before < 1.6 * factor.u.nbytes


def resident(which: str) -> int:
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
