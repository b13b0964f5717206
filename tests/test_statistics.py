"""Sums over calibration tokens are float32 sums, whatever the dtype and torch's settings are."""

from __future__ import annotations

import pytest
import torch
from lowbit.calib.statistics import WIDE, Hessian


def _outlying(tokens: int, columns: int) -> torch.Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 300  # what the sum's rounding would have to be small against
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [48, WIDE + 30])
def test_hessian_is_summed_in_float32(dtype: torch.dtype, columns: int) -> None:
    x = _outlying(700, columns).to(dtype)
    hessian = Hessian(columns)
    for part in x.split(300):
        hessian.add(part[None])
    exact = x.double().T @ x.double() / len(x)
    size = exact.diagonal().sqrt()
    error = ((hessian.mean() - exact).abs() / size.outer(size)).max()
    assert error < 1e-5  # rounded to bfloat16 it is 2e-3
    assert torch.linalg.eigvalsh(hessian.mean())[0] > 0


def test_hessian_leaves_torchs_settings() -> None:
    settings = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = [s.fp32_precision for s in settings]
    try:
        torch.set_float32_matmul_precision("medium")
        chosen = [s.fp32_precision for s in settings]
        x = _outlying(700, 64)
        medium, highest = Hessian(64), Hessian(64)
        medium.add(x)
        assert [s.fp32_precision for s in settings] == chosen
        torch.set_float32_matmul_precision("highest")
        highest.add(x)
        assert torch.equal(medium.mean(), highest.mean())
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
