"""The backward pass layer by layer equals autograd through the whole model, and predicts KL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lowbit.calib.fisher import LayerFisher, run_backward
from lowbit.calib.model import LayeredModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .models import change_json, change_tensors, deep_llama


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = deep_llama(tmp_path_factory.mktemp("fisher") / "model", layers=5)
    if not request.param:
        change_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=False))
        change_tensors(folder, _add_head)
    return folder


def _add_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).clone()


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randint(3, 200, (3, 24), generator=torch.Generator().manual_seed(1))


def moments(folder: Path, rows: Tensor, batch_size: int) -> dict[str, LayerFisher]:
    seen: dict[str, LayerFisher] = {}
    model = LayeredModel(folder)
    run_backward(
        model, rows, lambda name: True, lambda f: seen.update({f.name: f}), batch_size, seed=7
    )
    assert list(seen) == list(reversed(model.layers))
    assert all(p.is_meta for p in model.model.parameters()), "weights were not released"
    return seen


def whole_model_moments(folder: Path, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of each linear: sum of g^2 [out], and mean of |g|^2/out x x^T [in, in]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n}
    reads: dict[str, Tensor] = {}
    outs: dict[str, Tensor] = {}

    def hook(name: str):
        def note(_, args, out):
            reads[name] = args[0].detach().flatten(0, 1)
            out.retain_grad()
            outs[name] = out

        return note

    for name, module in linears.items():
        module.register_forward_hook(hook(name))
    draw = torch.Generator().manual_seed(7)
    log_p = model(input_ids=rows).logits.log_softmax(-1)
    drawn = [torch.multinomial(row.exp(), 1, generator=draw) for row in log_p.detach()]
    log_p.gather(2, torch.stack(drawn)).sum().backward()
    squares, guided = {}, {}
    for name in linears:
        gradient, x = outs[name].grad, reads[name]
        assert gradient is not None
        g2 = gradient.flatten(0, 1).square()
        squares[name] = g2.sum(0)
        guided[name] = (x * g2.mean(1, keepdim=True)).T @ x / rows.numel()
    return squares, guided


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_equals_autograd_through_the_whole_model(folder, rows, batch_size: int) -> None:
    squares, guided = whole_model_moments(folder, rows)
    fisher = {
        n: f
        for layer in moments(folder, rows, batch_size).values()
        for n, f in layer.fisher.items()
    }
    assert fisher.keys() == squares.keys()
    for name, f in fisher.items():
        share = squares[name] / squares[name].mean()
        torch.testing.assert_close(f.output_weight(), share, rtol=1e-3, atol=1e-4)
        scale = guided[name].abs().max().item()
        torch.testing.assert_close(f.guided.mean(), guided[name], rtol=1e-3, atol=1e-5 * scale)


def test_linears_that_read_one_input_share_its_hessian(folder, rows) -> None:
    for name, layer in moments(folder, rows, 2).items():
        readers = [[n.rpartition(".")[2] for n in shared.readers] for shared in layer.inputs]
        assert readers == [
            ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]
        ]  # fmt: skip
        assert all(shared.hessian.tokens == rows.numel() for shared in layer.inputs), name
