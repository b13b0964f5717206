"""Linears of float weights: every kernel against float64, and which one a CPU gets."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels import plain_linear
from lowbit.kernels.compiled import decline_compiled
from lowbit.kernels.plain_linear import (
    COMPILED,
    PLAIN_KERNELS,
    TORCH,
    WIDE,
    PlainProblem,
    choose_plain,
    product_dtype,
)

BFLOAT16 = PlainProblem(torch.bfloat16, "cpu", in_features=48)
FLOAT32 = PlainProblem(torch.float32, "cpu", in_features=48)
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


@pytest.fixture
def an_old_amd(monkeypatch):
    """A CPU without AVX512."""
    for name in ("_has_bfloat16", "_has_avx512"):
        monkeypatch.setattr(plain_linear, name, lambda: False)
    monkeypatch.setattr(plain_linear, "prefers_compiled", lambda: decline_compiled() is None)
    monkeypatch.setitem(plain_linear._HAS, torch.bfloat16, lambda: False)
    choose_plain.cache_clear()
    yield
    choose_plain.cache_clear()


def operands(dtype: torch.dtype, rows: tuple[int, ...], out: int = 70, columns: int = 48):
    g = torch.Generator().manual_seed(len(rows) + rows[-1])
    x, w = (torch.randn(*shape, columns, generator=g).to(dtype) for shape in (rows, (out,)))
    return x, w, torch.randn(out, generator=g).to(dtype)


@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (3,), (17,), (2, 5)], ids=str)
@pytest.mark.parametrize("kernel", PLAIN_KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_the_product(kernel, dtype, rows, an_old_amd, monkeypatch):
    if kernel not in (COMPILED, WIDE, TORCH):
        monkeypatch.undo()
    if reason := kernel.decline(PlainProblem(dtype, "cpu", in_features=48)):
        pytest.skip(reason)
    x, w, bias = operands(dtype, rows)
    for b in (None, bias):
        y = kernel.run(x, kernel.pack(w), b)
        exact = x.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype == dtype and y.shape == exact.shape
        ulp = torch.finfo(dtype).eps * max(1.0, float(exact.abs().amax()) if y.numel() else 1.0)
        assert y.numel() == 0 or (y.double() - exact).abs().max() < 4 * ulp
        if kernel.add is not None:
            whole = kernel.add(x, kernel.pack(w), b, exact.to(dtype))
            assert whole.dtype == dtype and whole.shape == exact.shape
            assert y.numel() == 0 or (whole.double() - 2 * exact).abs().max() < 8 * ulp


def test_a_wide_product_is_that_of_float32_rounded_once(an_old_amd, monkeypatch):
    monkeypatch.setattr(plain_linear, "WIDE_WEIGHTS", 48 * 16)  # the last part is cut
    x, w, _ = operands(torch.bfloat16, (9,))
    y = WIDE.run(x, WIDE.pack(w), None)
    exact = x.float() @ w.float().T
    assert (y != exact.bfloat16()).float().mean() < 0.01  # but for sums on the edge of rounding
    again = WIDE.run(x, WIDE.pack(w), None)
    assert torch.equal(y, again)


@needs_onednn
def test_what_a_cpu_without_avx512_gets(an_old_amd, monkeypatch):
    assert product_dtype(torch.bfloat16, "cpu") == torch.float32
    assert product_dtype(torch.bfloat16, "cuda") == torch.bfloat16
    compiled = decline_compiled() is None
    assert choose_plain(BFLOAT16).candidate is (COMPILED if compiled else WIDE)
    assert choose_plain(FLOAT32).candidate is (COMPILED if compiled else TORCH)
    odd = choose_plain(BFLOAT16._replace(in_features=44))
    assert odd.candidate is WIDE and "multiple of 8 inputs, not 44" in odd.declined["compiled"]
    monkeypatch.setattr(plain_linear, "prefers_compiled", lambda: False)
    choose_plain.cache_clear()
    assert choose_plain(BFLOAT16).candidate is WIDE
    assert choose_plain(FLOAT32).candidate is TORCH


@pytest.mark.skipif(decline_compiled() is not None, reason=str(decline_compiled()))
def test_a_cpu_with_avx512_keeps_its_own_products(an_old_amd, monkeypatch):
    monkeypatch.setattr(plain_linear, "prefers_compiled", lambda: False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        reason = COMPILED.decline(PlainProblem(dtype, "cpu", in_features=48))
        assert reason == "is not for a CPU with AVX512"


def test_few_numbers_of_rows_are_met():
    padded = [plain_linear._padded_rows(n) for n in range(1, 2049)]
    assert padded[:8] == list(range(1, 9)) and padded[8:17] == [10, 10, 12, 12, 14, 14, 16, 16, 20]
    assert all(n <= p <= 1.25 * n for n, p in enumerate(padded, 1))
    assert len(set(padded)) == 40
