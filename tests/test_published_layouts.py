"""Checkpoints that other programs make are read and run, wrong labels named, damage refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.quantize.activations import fake_quantize_input
from lowbit.quantize.checkpoint.layouts.gptq import version_of
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.runtime import LLM

from .models import change_json, change_tensors, copied
from .published_layouts import (
    Grid,
    awq_tensors,
    float8_of,
    float8_tensors,
    gptq_quantization,
    gptq_tensors,
    grid_of,
    int8_tensors,
    llm_compressor_quantization,
    packed_tensors,
    write_checkpoint,
)
from .runtime_models import FAMILIES, save_tiny

AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama") / "model", FAMILIES["llama"]())


def autoround_scales(w: torch.Tensor) -> Grid:
    return grid_of(w, 4, 32, symmetric=True, negative=True)


W4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
BY_TOKEN = {"strategy": "token", "dynamic": True}
PUBLISHED: dict[str, tuple[Any, Any, Any]] = {
    "GPTQModel, 4 bits": (
        gptq_quantization(4, 32, True),
        lambda w: grid_of(w, 4, 32, True),
        lambda m, g: gptq_tensors(m, g, 4, 1),
    ),
    "GPTQModel, desc_act": (
        gptq_quantization(4, 32, False, desc_act=True, checkpoint_format="gptq_v2"),
        lambda w: grid_of(w, 4, 32, False, shuffled=True),
        lambda m, g: gptq_tensors(m, g, 4, 2),
    ),
    "GPTQModel, 3 bits": (
        gptq_quantization(3, 32, False),
        lambda w: grid_of(w, 3, 32, False),
        lambda m, g: gptq_tensors(m, g, 3, 1),
    ),
    "AutoRound, scales below 0": (
        gptq_quantization(4, 32, True, provider="auto-round"),
        autoround_scales,
        lambda m, g: gptq_tensors(m, g, 4, 1),
    ),
    "AutoRound's own config": (
        {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "data_type": "int",
         "act_bits": 16},
        autoround_scales,
        lambda m, g: gptq_tensors(m, g, 4, 1),
    ),
    "AutoAWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": None},
        lambda w: grid_of(w, 4, 32, False),
        awq_tensors,
    ),
    "llm-compressor, W4A16, actorder static": (
        llm_compressor_quantization("pack-quantized", {**W4, "actorder": "static"}),
        lambda w: grid_of(w, 4, 32, True, scale_dtype=torch.bfloat16),
        lambda m, g: packed_tensors(m, g, 4),
    ),
    "llm-compressor, W4A16, actorder group": (  # of older versions
        llm_compressor_quantization("pack-quantized", {**W4, "actorder": "group"}),
        lambda w: grid_of(w, 4, 32, True, shuffled=True, scale_dtype=torch.bfloat16),
        lambda m, g: packed_tensors(m, g, 4, order=True),
    ),
    "llm-compressor, W4A16_ASYM": (
        llm_compressor_quantization(
            "pack-quantized", {**W4, "symmetric": False, "zp_dtype": "torch.int8"}
        ),
        lambda w: grid_of(w, 4, 32, False, scale_dtype=torch.bfloat16),
        lambda m, g: packed_tensors(m, g, 4),
    ),
    "llm-compressor, 3 bits": (
        llm_compressor_quantization("pack-quantized", {**W4, "num_bits": 3}),
        lambda w: grid_of(w, 3, 32, True, scale_dtype=torch.bfloat16),
        lambda m, g: packed_tensors(m, g, 3),
    ),
    "llm-compressor, W8A8": (
        llm_compressor_quantization(
            "int-quantized", {"strategy": "channel", "actorder": "static"}, BY_TOKEN
        ),
        lambda w: grid_of(w, 8, w.shape[1], True, scale_dtype=torch.bfloat16),
        int8_tensors,
    ),
    "llm-compressor, FP8": (
        llm_compressor_quantization(
            "float-quantized", {"type": "float"}, {"type": "float", "observer": "static_minmax"}
        ),
        lambda w: float8_of(w, (w.shape[0], w.shape[1])),
        lambda m, s: float8_tensors(m, s, peak=4.0),
    ),
    "llm-compressor, FP8_DYNAMIC": (
        llm_compressor_quantization(
            "float-quantized", {"type": "float", "strategy": "channel"},
            {**BY_TOKEN, "type": "float"},
        ),
        lambda w: float8_of(w, (1, w.shape[1])),
        float8_tensors,
    ),
    "llm-compressor, FP8_BLOCK": (
        llm_compressor_quantization(
            "float-quantized",
            {"type": "float", "strategy": "block", "block_structure": [128, 128]},
            {"type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
        ),
        lambda w: float8_of(w, (128, 128)),
        float8_tensors,
    ),
}  # fmt: skip


def inputs_of(quantization: dict[str, Any]) -> Any:
    groups = quantization.get("config_groups", {"group_0": {"input_activations": None}})
    return groups["group_0"]["input_activations"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_are_read_and_run(
    name: str, tiny_llama: Path, tmp_path: Path
) -> None:
    quantization, grid, pack = PUBLISHED[name]
    values = write_checkpoint(tiny_llama, tmp_path / "out", quantization, grid, pack)
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.warnings == []
    assert set(checkpoint.schemes) == set(values)
    assert all(torch.equal(checkpoint.dense_weight(m), w) for m, w in values.items())
    assert checkpoint.shape(Q_PROJ) == (64, 64)
    llm = LLM(tmp_path / "out", "cpu", "float32")
    assert len(llm.linear_report()) == len(values)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    y = llm.model.get_submodule(Q_PROJ)(x)
    rounded = checkpoint.schemes[Q_PROJ].input_activations
    assert (rounded is None) == (not inputs_of(quantization))
    if rounded is not None:
        x = fake_quantize_input(x, rounded, checkpoint.input_scale(Q_PROJ))
    expected = x @ values[Q_PROJ].T
    assert (y - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_a_wrong_version_label_is_seen_and_named(
    version: int, num_bits: int, tiny_llama: Path, tmp_path: Path
) -> None:
    wrong = {1: "gptq_v2", 2: "gptq"}[version]
    values = write_checkpoint(
        tiny_llama, tmp_path / "out",
        gptq_quantization(num_bits, 32, True, checkpoint_format=wrong),
        lambda w: grid_of(w, num_bits, 32, True),
        lambda m, g: gptq_tensors(m, g, num_bits, version),
    )  # fmt: skip
    checkpoint = Checkpoint(tmp_path / "out")
    right = {1: "gptq", 2: "gptq_v2"}[version]
    assert checkpoint.layout is not None
    assert checkpoint.layout.name == right
    assert [w for w in checkpoint.warnings if f"says {wrong}" in w and f"read as {right}" in w]
    assert torch.equal(checkpoint.dense_weight(Q_PROJ), values[Q_PROJ])


def test_zeros_that_tell_no_version() -> None:
    asymmetric = torch.tensor([[0x76543210]]).int()
    assert version_of([(4, asymmetric)]) is None
    assert version_of([(4, torch.tensor([[0x77777777]]).int()), (4, asymmetric)]) is None
    assert version_of([]) is None


def breaks(leaf: str, change: Any) -> Any:
    name = f"{Q_PROJ}.{leaf}"
    return lambda f: change_tensors(f, lambda t: t.update({name: change(t[name])}))


def says(**changes: Any) -> Any:
    return lambda f: change_json(
        f / "config.json", lambda c: c["quantization_config"].update(changes)
    )


DAMAGES: dict[str, tuple[Any, str]] = {
    "g_idx out of bounds": (breaks("g_idx", lambda t: t + 1), r"g_idx names group 2, but"),
    "g_idx below 0": (breaks("g_idx", lambda t: t - 1), "g_idx names group -1"),
    "g_idx cut": (breaks("g_idx", lambda t: t[:-1]), r"g_idx has shape \(63,\)"),
    "g_idx of other numbers": (breaks("g_idx", lambda t: t.long()), "g_idx is torch.int64"),
    "scales cut": (breaks("scales", lambda t: t[:1].contiguous()), "scales has shape"),
    "scales of integers": (breaks("scales", lambda t: t.int()), "holds no scale"),
    "scales infinite": (breaks("scales", lambda t: t / 0), "finite"),
    "zeros cut": (breaks("qzeros", lambda t: t[:, :-1].contiguous()), "qzeros holds 7 words"),
    "zeros of several kinds": (breaks("qzeros", lambda t: t + 1), "config.json says sym"),
    "codes of floats": (breaks("qweight", lambda t: t.float()), "qweight is torch.float32"),
    "codes in one axis": (breaks("qweight", lambda t: t.flatten()), "1 axes"),
    "other bits": (says(bits=8), "qzeros holds 8 words"),
    "bits of no GPTQ": (says(bits=5), "2, 3, 4 or 8 bits"),
    "bits no number": (says(bits="four"), "not that of a GPTQ checkpoint"),
    "other groups": (says(group_size=48), "groups of 48 do not divide"),
    "packed otherwise": (says(pack_dtype="int64"), "int64"),
    "left alone, yet stored": (says(dynamic={"-:.*q_proj": {}}), "leaves it alone"),
    "a bad pattern": (says(dynamic={"+:[": {"bits": 8}}), "not that of a GPTQ checkpoint|regular"),
}


@pytest.fixture(scope="module")
def gptq_checkpoint(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed: copy it."""
    quantization, grid, pack = PUBLISHED["GPTQModel, 4 bits"]
    folder = tmp_path_factory.mktemp("gptq") / "whole"
    write_checkpoint(tiny_llama, folder, quantization, grid, pack)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_gptq_checkpoints_are_refused(
    damage: str, gptq_checkpoint: Path, tmp_path: Path
) -> None:
    folder = copied(gptq_checkpoint, tmp_path / "damaged")
    apply, message = DAMAGES[damage]
    apply(folder)
    with pytest.raises(UserError, match=message):
        Checkpoint(folder).quantized(Q_PROJ)
