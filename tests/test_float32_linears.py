"""float32 linears by oneDNN equal torch's up to rounding, only where no gradient is wanted."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels import float32_linears as module
from torch import nn


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU on which torch's own is as fast."""
    monkeypatch.setattr(module, "has_fast_float32", torch.backends.mkldnn.is_available)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 48), (3, 7, 48), (48,), (0, 48)])
def test_they_equal_torchs(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 33, bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = layer.double()(x.double())
        layer.float()
        with module.float32_linears():
            got = layer(x)
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_others_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("not to be used")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse, raising=False)
    with module.float32_linears():
        nn.Linear(8, 8)(torch.ones(2, 8, requires_grad=True)).sum().backward()
        with torch.no_grad():
            nn.Linear(8, 8).bfloat16()(torch.ones(2, 8, dtype=torch.bfloat16))
            with pytest.raises(AssertionError, match="not to be used"):
                nn.Linear(8, 8)(torch.ones(2, 8))
