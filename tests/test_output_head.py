"""An output head that is named among the targets is quantized on what it really reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lowbit.calib.layer_loop import run_layers
from lowbit.calib.layer_worker import InputGroup, LayerWorker
from lowbit.calib.model import LayeredModel
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.recipe import Calibration, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from torch import nn
from transformers import AutoModelForCausalLM

from .runtime_models import FAMILIES, VOCAB, save_tiny


def make_model(family: str, folder: Path, tied: bool) -> Path:
    config = FAMILIES[family]()
    config.tie_word_embeddings = tied
    return save_tiny(folder, config)


class HeadWatcher(LayerWorker):
    """Wants the head alone and keeps its input's Hessian."""

    needs = frozenset({"hessian"})

    def __init__(self, name: str) -> None:
        self.name = name
        self.hessian: torch.Tensor | None = None

    def wants(self, name: str) -> bool:
        return name == self.name

    def quantize(self, group: InputGroup) -> None:
        self.hessian = group.statistics["hessian"].mean()

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        assert not dropped

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        return False


@pytest.mark.parametrize("family", ["qwen2", "opt", "gpt_neox"])
@pytest.mark.parametrize("order", ["sequential", "parallel"])
def test_the_head_is_calibrated_on_the_final_hidden_states(family, order, tmp_path: Path) -> None:
    folder = make_model(family, tmp_path / family, tied=False)
    model = LayeredModel(folder)
    assert model.head is not None
    rows = torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
    watcher = HeadWatcher(model.head)
    run_layers(model, rows, watcher, order, batch_size=3)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    read: list[torch.Tensor] = []
    whole.get_output_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad():
        whole(rows)
    x = read[0].flatten(0, 1)
    assert watcher.hessian is not None
    assert torch.allclose(watcher.hessian, x.T @ x / len(x), atol=1e-5)


def test_a_tied_head_is_refused_and_an_untied_one_quantized(tmp_path: Path) -> None:
    recipe = Recipe(
        (WeightPass(group_size=32, targets=("Linear", "lm_head")),),
        Calibration("pydoc", samples=2, seq_len=16),
    )
    tied = make_model("llama", tmp_path / "tied", tied=True)
    with pytest.raises(UserError, match="shares its weight"):
        quantize_model(tied, tmp_path / "out", recipe)
    untied = make_model("llama", tmp_path / "untied", tied=False)
    quantize_model(untied, tmp_path / "out", recipe)
    assert "lm_head" in Checkpoint(tmp_path / "out").schemes
    unasked = replace(recipe, passes=(WeightPass(group_size=32),))
    quantize_model(untied, tmp_path / "plain", unasked)
    assert "lm_head" not in Checkpoint(tmp_path / "plain").schemes
