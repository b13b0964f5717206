"""The token embedding by GPTQ: less divergence than rounding, and what layers are calibrated on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from lowbit.calib.model import LayeredModel
from lowbit.quantize.gguf.blocks import CODECS
from lowbit.quantize.gguf.embedding import ReplacedSource, embedding_blocks, embedding_fisher
from lowbit.quantize.gguf.gptq_run import SETTINGS, SWEEPS, export_gptq
from lowbit.quantize.gguf.imatrix_run import Settings, open_with_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from .gguf_models import shared_data, tiny_llama

EMBEDDING = "model.embed_tokens.weight"


def test_a_trained_model_diverges_less_than_with_a_rounded_embedding() -> None:
    source, texts = shared_data() / "stories260k-ffn192", shared_data() / "text"
    settings = Settings(str(texts / "tinystories_train_sample.txt"), samples=24, seq_len=256)
    model, rows, _ = open_with_rows(source, settings)
    hf: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weight, codec = hf.get_input_embeddings().weight.detach(), CODECS["Q4_0"]
    fisher = embedding_fisher(model, rows)
    assert fisher.shape == (weight.shape[1],) * 2
    made: Any = codec
    solved = codec.decode(embedding_blocks(weight, fisher, made, SETTINGS, SWEEPS).blocks)
    rounded = codec.decode(codec.encode(weight, fisher.diagonal().contiguous()))
    other = (texts / "tinystories_valid.txt").read_text()[:20000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(other).input_ids[:4096]).view(16, 256)

    def log_probabilities(embedding: Tensor) -> Tensor:
        changed = copy.deepcopy(hf)
        changed.lm_head.weight = torch.nn.Parameter(weight.clone())  # tied to it otherwise
        changed.get_input_embeddings().weight = torch.nn.Parameter(embedding)
        with torch.inference_mode():
            return changed(ids).logits.log_softmax(-1)

    expected = log_probabilities(weight)

    def divergence(embedding: Tensor) -> float:
        return float((expected.exp() * (expected - log_probabilities(embedding))).sum(-1).mean())

    assert divergence(solved) < 0.8 * divergence(rounded)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "m", hidden_size=256)


def test_layers_are_calibrated_on_what_the_file_holds(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "some.txt"
    text.write_text("the thin tin then in a thing, and a hat in the bin " * 80)
    seen: list[Tensor] = []
    calls = LayeredModel.layer_calls

    def noted(self: LayeredModel, rows: Tensor, batch_size: int) -> Any:
        seen.append(self.shards.get(EMBEDDING))
        return calls(self, rows, batch_size)

    monkeypatch.setattr(LayeredModel, "layer_calls", noted)
    out = tmp_path / "m.gguf"
    settings = Settings(str(text), samples=4, seq_len=64)
    report = export_gptq(model, out, "Q4_K_M", settings, progress=False)
    stored = next(t for t in gguf.GGUFReader(out).tensors if t.name == "token_embd.weight")
    values = torch.from_numpy(np.array(gguf.quants.dequantize(stored.data, stored.tensor_type)))
    assert stored.tensor_type.name == "Q4_K"
    assert any(torch.equal(values, embedding.float()) for embedding in seen)
    assert 0 < report.solved["token_embd.weight"] < 0.1
    original = seen[0].float()
    assert not torch.equal(values, original)


def test_other_values_stand_in_for_a_tensor(model: Path) -> None:
    source = LayeredModel(model).shards
    values = torch.zeros(source.info[EMBEDDING].shape)
    replaced = ReplacedSource(source, {EMBEDDING: values})
    assert torch.equal(replaced.get(EMBEDDING), values)
    assert replaced.names() == source.names() and replaced.info == source.info
    other = "model.norm.weight"
    assert torch.equal(replaced.get(other), source.get(other))
