"""Calibration's causal attention equals torch's, and stands in for it only where that is so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lowbit.calib import causal_attention as module
from lowbit.calib.causal_attention import BLOCK, causal_attention
from lowbit.calib.model import LayeredModel, forward_layer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .runtime_models import FAMILIES, save_tiny


def _qkv(rows: int, heads: int, kv_heads: int, seq: int, width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, seq, n, width) for n in (heads, kv_heads, kv_heads)]
    made = [torch.randn(s, generator=generator).mul(3).bfloat16() for s in shapes]
    return [t.transpose(1, 2) for t in made]  # as projections lay them out


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("seq", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_it_is_as_near_to_the_exact_product_as_torchs(heads: int, kv_heads: int, seq: int) -> None:
    q, k, v = _qkv(3, heads, kv_heads, seq)
    exact = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=0.3, enable_gqa=True
    )
    torchs = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    ours = causal_attention(q, k, v, 0.3)
    assert ours.shape == q.shape and ours.dtype == torch.bfloat16
    assert _error(ours, exact) < 1.5 * _error(torchs, exact) + 1e-4


def test_heads_may_be_split_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _qkv(3, 6, 2, BLOCK + 5)
    whole = causal_attention(q, k, v, 0.25)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 1)  # a row's key-value head at a time
    assert _error(causal_attention(q, k, v, 0.25), whole.double()) < 5e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_hidden_states_stay(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 alternates windows, which bring a mask, with plain causal attention."""
    used: list[int] = []
    ours = module.causal_attention
    monkeypatch.setattr(module, "causal_attention", lambda *a: used.append(1) or ours(*a))
    save_tiny(tmp_path, FAMILIES[family]())
    rows = torch.randint(0, 256, (2, 70), generator=torch.Generator().manual_seed(1))
    states = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = LayeredModel(tmp_path, dtype)
        (calls,) = model.layer_calls(rows, 2)
        for name, layer in list(model.layers.items())[-1:]:
            with torch.inference_mode(), model.loaded(name):
                states[dtype] = forward_layer(layer, calls[name])
        windowed = family == "mistral"  # all of its layers, by a window shorter than the rows
        assert bool(used) is (dtype == torch.bfloat16 and not windowed)
    assert _error(states[torch.bfloat16], states[torch.float32].double()) < 0.02
