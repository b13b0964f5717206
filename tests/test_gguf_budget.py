"""Types by tensor under a number of bits per weight: kept to, and better than one type for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.export import export
from lowbit.quantize.gguf.budget import TypeBudget, budget_types, candidates
from lowbit.quantize.gguf.export import ExportReport, export_gguf
from lowbit.quantize.gguf.imatrix_run import Settings, imatrix_of_model
from lowbit.quantize.gguf.reader import GGUFFile
from lowbit.quantize.gguf.to_hf import gguf_to_hf
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from .gguf_models import shared_data, tiny_llama
from .runtime_models import quantize_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("the thin tin then in a thing, and a hat in the bin " * 80)
    return path


@pytest.fixture(scope="module")
def settings(text: Path) -> Settings:
    return Settings(str(text), samples=4, seq_len=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "m"
    return tiny_llama(folder, hidden_size=256, intermediate_size=512)


def written(model: Path, out: Path, chosen: TypeBudget) -> ExportReport:
    types = chosen.tensor_types()
    return export_gguf(model, out, chosen.file_type, tensor_types=types, progress=False)


@pytest.mark.parametrize("bits", [3.5, 4.5, 6.0])
def test_the_file_keeps_to_the_budget(
    model: Path, settings: Settings, tmp_path: Path, bits: float
) -> None:
    chosen = budget_types(model, bits, settings)
    report = written(model, tmp_path / "m.gguf", chosen)
    assert report.bits_per_weight == pytest.approx(chosen.bits)
    assert bits - 0.15 < chosen.bits <= bits
    assert 0 < chosen.bound <= chosen.predicted_kld * 1.0001
    stored = {name: t.kind for name, t in GGUFFile(tmp_path / "m.gguf").tensors.items()}
    assert {name: stored[name] for name in chosen.types} == chosen.types
    assert chosen.types["output.weight"] == "Q6_K"


def test_more_bits_cost_less_and_named_tensors_stay(model: Path, settings: Settings) -> None:
    few, many = (budget_types(model, bits, settings) for bits in (4.0, 5.5))
    assert many.predicted_kld < 0.5 * few.predicted_kld
    kept = budget_types(model, 4.5, settings, ["ffn_down=Q8_0"])
    assert not any("ffn_down" in name for name in kept.types)
    fed = budget_types(model, 4.0, settings, feedback=True)
    assert fed.predicted_kld < few.predicted_kld


def test_a_trained_model_diverges_less_than_with_one_type_for_all(tmp_path: Path) -> None:
    source, texts = shared_data() / "stories260k-ffn192", shared_data() / "text"
    rows = Settings(str(texts / "tinystories_train_sample.txt"), samples=16, seq_len=256)
    imatrix = imatrix_of_model(source, rows, progress=False)
    uniform = export_gguf(source, tmp_path / "one.gguf", "Q4_1", imatrix=imatrix, progress=False)
    chosen = budget_types(source, uniform.bits_per_weight, rows)
    assert len(set(chosen.types.values())) > 2
    types = chosen.tensor_types()
    mixed = export_gguf(
        source, tmp_path / "mixed.gguf", chosen.file_type, tensor_types=types, imatrix=imatrix,
        progress=False,
    )  # fmt: skip
    assert mixed.bits_per_weight <= uniform.bits_per_weight
    other = (texts / "tinystories_valid.txt").read_text()[:20000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(other).input_ids[:4096]).view(16, 256)

    def log_probabilities(folder: Path) -> Tensor:
        with torch.inference_mode():
            hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return hf(ids).logits.log_softmax(-1)

    expected = log_probabilities(source)

    def divergence(name: str) -> float:
        back = gguf_to_hf(tmp_path / f"{name}.gguf", tmp_path / name, progress=False)
        return float((expected.exp() * (expected - log_probabilities(back))).sum(-1).mean())

    assert divergence("mixed") < 0.9 * divergence("one")


def test_candidates_fill_whole_blocks() -> None:
    assert candidates(512)[0] == "Q2_K" and "Q4_0" not in candidates(512)
    assert candidates(96) == ["Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    assert candidates(40) == []


def test_what_cannot_be_is_refused(model: Path, settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the smallest types take"):
        budget_types(model, 1.5, settings)
    packed = quantize_folder(model, tmp_path / "w4", "W4A16", 32)
    with pytest.raises(UserError, match="is quantized"):
        budget_types(packed, 4.5, settings)


def run(*arguments: str | Path) -> Any:
    app = typer.Typer()
    app.command()(export)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    options = ["--calib", text, "--samples", "4", "--seq-len", "64"]
    result = run(model, "-o", out, "--budget", "4.6", *options)
    assert result.exit_code == 0, result.output
    assert "budget 4.6: 4.5" in result.stderr and out.is_file()
    for more in (["--type", "Q4_0"], ["--pure"]):
        error = run(model, "-o", out, "--budget", "4.6", *more).exception
        assert isinstance(error, UserError) and "--budget chooses" in str(error)
    error = run(model, "-o", out, "--budget", "0.5").exception
    assert isinstance(error, UserError) and "over 1" in str(error)
