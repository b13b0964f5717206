"""Linears that read one input are one product, and give what they give apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.linear_ops import choose_linear
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.spec import scheme_from_name
from lowbit.runtime import LLM, fill
from lowbit.runtime.fused import LinearPart, SharedProduct, can_join, fusions
from lowbit.runtime.linear import PackedLinear
from torch import Tensor, nn

from .runtime_models import FAMILIES, quantize_folder, save_tiny

IDS = torch.tensor([[256, 84, 104, 101, 32, 100, 111, 103], [7, 6, 5, 4, 3, 2, 1, 0]])


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Of a family whose q, k and v have biases."""
    return save_tiny(tmp_path_factory.mktemp("qwen2"), FAMILIES["qwen2"]())


def attention(llm: LLM) -> Any:
    return llm.model.model.layers[0].self_attn


def logits(llm: LLM) -> Tensor:
    with torch.inference_mode():
        return llm.logits(IDS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC"])
def test_fused_equals_apart(scheme, dtype, source, tmp_path, monkeypatch) -> None:
    group = 32 if scheme.startswith("W4") else None
    folder = quantize_folder(source, tmp_path / "out", scheme, group)
    fused = LLM(folder, "cpu", dtype, engine="contiguous")
    assert isinstance(attention(fused).q_proj, LinearPart)
    assert isinstance(attention(fused).qkv_proj, PackedLinear)
    assert isinstance(fused.model.model.layers[1].mlp.gate_up_proj, PackedLinear)
    monkeypatch.setattr(fill, "can_join", lambda weights, scales: len(weights) == 1)
    apart = LLM(folder, "cpu", dtype, engine="contiguous")
    assert isinstance(attention(apart).q_proj, PackedLinear)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(fused.dtype)
    names = ("q_proj", "k_proj", "v_proj")
    for linear in (getattr(attention(llm), n) for llm in (fused, apart) for n in names):
        linear.bias.data.copy_(torch.linspace(-1, 1, len(linear.bias)))  # zeros in a new model
    for name in names:
        got, want = (getattr(attention(llm), name)(x) for llm in (fused, apart))
        torch.testing.assert_close(got, want, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-5)
    got, want = logits(fused), logits(apart)
    assert (got - want).float().abs().max() < (1e-4 if dtype == "float32" else 0.05) * want.std()
    reports = [{r.module: r.problem for r in llm.linear_report()} for llm in (fused, apart)]
    assert reports[0] == reports[1]
    sizes = [sum(r.nbytes for r in llm.linear_report()) for llm in (fused, apart)]
    assert sizes[0] == sizes[1]


def test_other_schemes_stay_apart(source, tmp_path) -> None:
    folder = quantize_folder(source, tmp_path / "out", mixed={"k_proj": "W8A16"})
    llm = LLM(folder, "cpu", "float32")
    assert isinstance(attention(llm).q_proj, PackedLinear)
    assert isinstance(llm.model.model.layers[0].mlp.gate_proj, LinearPart)


def test_only_what_stands_together_is_one_product() -> None:
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.q_proj", "b.v_proj", "up_proj"]
    made = fusions(names, lambda parts: True)
    assert [f.parts for f in made] == [tuple(names[:3]), *((n,) for n in names[3:])]
    assert made[0].module == "a.qkv_proj"
    assert [f.parts for f in fusions(names, lambda parts: False)] == [(n,) for n in names]


def test_weights_with_numbers_of_their_own_do_not_join() -> None:
    spec = scheme_from_name("W4A16").weights
    q = rtn_quantize(torch.randn(4, 128), spec, torch.float32)
    one, two = torch.ones(1), torch.full((1,), 2.0)
    assert can_join([q, q], [None, None]) and can_join([q, q], [one, one.clone()])
    assert not can_join([q, q], [one, two]) and not can_join([q, q], [one, None])
    order = torch.arange(128, dtype=torch.int32)
    assert not can_join([q, q._replace(g_idx=order)], [None, None])
    assert not can_join([q._replace(global_scale=s) for s in (one, two)], [None, None])


def test_a_product_is_computed_once_for_an_input() -> None:
    class Counted(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            Counted.calls += 1
            return super().forward(input)

    whole = Counted(8, 6, bias=False)
    product = SharedProduct(whole, [4, 2])
    x, other = torch.randn(3, 8), torch.randn(3, 8)
    first = [product.part(x, i) for i in range(2)]
    assert Counted.calls == 1 and product._x is None
    torch.testing.assert_close(torch.cat(first, 1), whole(x))
    Counted.calls = 0
    for given in (x, other, other):  # the same part again is another pass over the model
        torch.testing.assert_close(product.part(given, 0), whole(given)[:, :4])
    torch.testing.assert_close(product.part(x, 1), whole(x)[:, 4:])
    assert Counted.calls == 4 + 4


def test_the_kernel_of_a_product_is_chosen_for_its_whole(source, tmp_path) -> None:
    llm = LLM(quantize_folder(source, tmp_path / "out"), "cpu", engine="contiguous")
    whole = attention(llm).qkv_proj
    assert whole.problem.out_features == 64 + 2 * 32
    assert whole.report.kernel == choose_linear(whole.problem).candidate.name
    notes = {r.note for r in llm.linear_report() if r.module.endswith("k_proj")}
    assert all(note.endswith("one product, qkv_proj") for note in notes) and len(notes) == 1
