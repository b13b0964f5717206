"""`quantize run --format`: a pass's numbers in every layout, checked before any data is read."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from lowbit.calib.statistics import Hessian
from lowbit.evals.scorer import load_scorer
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.passes.gptq import factor_hessian, gptq_quantize
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.passes.settings import BudgetSettings, GPTQSettings
from lowbit.quantize.recipe import Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.quantize.spec import Group, QuantSpec, scheme_from_name
from lowbit.runtime import LLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from .command import Commands
from .models import hashes

KILLED = -9
JOURNAL = "lowbit.quantize.checkpoint.journal"
WRITTEN = {  # format -> scheme, how the scales of a float32 model are stored
    "compressed-tensors": ("W4A16", torch.float32),
    "gptq": ("W3A16", torch.float16),
    "gptq_v2": ("W4A16_ASYM", torch.float16),
    "awq": ("W4A16_ASYM", torch.float16),
    "fp8": ("FP8_BLOCK", torch.float32),
}


def rounded(scheme: str, layout: str) -> Recipe:
    return Recipe((WeightPass(method="rtn", scheme=scheme),), format=layout)


@pytest.fixture(scope="module")
def written(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each format, rounded to nearest."""
    folder = tmp_path_factory.mktemp("formats")
    for name, (scheme, _) in WRITTEN.items():
        quantize_model(shallow, folder / name, rounded(scheme, name))
    return {name: folder / name for name in WRITTEN}


def assert_near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """A CPU's kernels may round inputs to whole numbers of 16 bits."""
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < 5e-4, f"{error:.1e}"


@pytest.mark.parametrize("name", WRITTEN)
def test_the_numbers_are_the_passs_own(name: str, written: dict[str, Path], shallow: Path) -> None:
    checkpoint, weights = Checkpoint(written[name]), load_file(shallow / "model.safetensors")
    assert checkpoint.layout is not None
    assert (checkpoint.layout.name, checkpoint.warnings) == (name, [])
    assert len(checkpoint.schemes) == 14
    for module, scheme in checkpoint.schemes.items():
        w = weights[f"{module}.weight"]
        q = rtn_quantize(w, scheme.weights, WRITTEN[name][1], WeightPass().rtn)
        assert torch.equal(checkpoint.dense_weight(module), q.dequantize())
    for other in set(weights) - {f"{m}.weight" for m in checkpoint.schemes}:
        assert torch.equal(checkpoint.shards.get(other), weights[other])


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_stored_is_what_the_layout_says(name: str, written: dict[str, Path]) -> None:
    checkpoint = Checkpoint(written[name])
    assert checkpoint.layout is not None
    for module, scheme in checkpoint.schemes.items():
        shape = checkpoint.shape(module)
        expected = checkpoint.layout.tensors(module, scheme, shape, torch.float32)
        info = checkpoint.shards.info
        assert set(expected) == set(checkpoint.stored_names(module))
        assert all((info[n].shape, info[n].dtype) == e[:2] for n, e in expected.items())


@pytest.mark.parametrize("name", WRITTEN)
def test_the_runtime_computes_what_the_reference_does(name: str, written: dict[str, Path]) -> None:
    llm, scorer = LLM(written[name], "cpu", "float32"), load_scorer(written[name])
    ids = torch.tensor([[256, 84, 104, 101, 32, 100, 111, 103]])
    with torch.no_grad():
        assert_near(llm.model(ids).logits[0], scorer(ids))
    assert len(llm.linear_report()) == 14


@pytest.mark.parametrize("name", WRITTEN)
def test_every_layout_says_which_program_and_version_wrote_it(
    name: str, written: dict[str, Path]
) -> None:
    config = json.loads((written[name] / "config.json").read_text())["quantization_config"]
    version = importlib.metadata.version("lowbit")
    if name == "compressed-tensors":
        assert config["producer"] == {"name": "lowbit", "version": version}
    else:
        assert config["meta"]["quantizer"] == [f"lowbit:{version}"]


def test_transformers_reads_fine_grained_fp8(written: dict[str, Path]) -> None:
    dequantizing = FineGrainedFP8Config(dequantize=True)  # its kernels want a GPU
    loaded = AutoModelForCausalLM.from_pretrained(
        written["fp8"], dtype=torch.float32, quantization_config=dequantizing, device_map="cpu"
    )
    checkpoint = Checkpoint(written["fp8"])
    for module in checkpoint.schemes:
        weight = loaded.get_submodule(module).weight
        assert torch.equal(weight, checkpoint.dense_weight(module))


def test_files_that_readers_of_gptq_look_for(written: dict[str, Path]) -> None:
    config = json.loads((written["gptq"] / "config.json").read_text())["quantization_config"]
    assert json.loads((written["gptq"] / "quantize_config.json").read_text()) == config
    said = {k: config[k] for k in ("bits", "group_size", "sym", "desc_act", "checkpoint_format")}
    assert said == {
        "bits": 3, "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq"
    }  # fmt: skip
    assert not (written["awq"] / "quantize_config.json").exists()


# columns grouped in processing order


@pytest.fixture(scope="module")
def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the Hessian of inputs of unequal size."""
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(128, 128, generator=g) / 128**0.5
    hessian = Hessian(128)
    hessian.add(torch.randn(1024, 128, generator=g) @ mix * torch.rand(128, generator=g).pow(3))
    return torch.randn(48, 128, generator=g), hessian.mean()


@pytest.mark.parametrize("static_groups", [True, False])
@pytest.mark.parametrize("refine_rounds", [0, 1])
def test_desc_act_groups_columns_by_the_hessian(layer, static_groups, refine_rounds) -> None:
    w, h = layer
    settings = GPTQSettings(
        act_order="desc_act", static_groups=static_groups, refine_rounds=refine_rounds
    )
    spec = QuantSpec(3, granularity=Group(32))
    factor = factor_hessian(h, settings)
    q, error = gptq_quantize(w, factor, spec, torch.float16, settings)
    assert q.g_idx is not None
    falling = torch.argsort(h.diagonal(), descending=True, stable=True)
    assert torch.equal(q.g_idx[falling], torch.arange(128, dtype=torch.int32) // 32)
    change = w - q.dequantize()
    assert torch.allclose(error, ((change @ factor.damped()) * change).sum(1), rtol=1e-3)
    straight, order = q.by_group()
    assert torch.equal(straight.dequantize(), q.dequantize()[:, order])


def test_desc_act_is_stored_run_and_resumed(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    options = [*calibration, "--format", "gptq", "--act-order", "desc_act", "--method", "gptq"]
    assert command("run", shallow, "-o", tmp_path / "whole", *options).code == 0
    killed = command("run", shallow, "-o", tmp_path / "out", *options,
                     kill_at=(JOURNAL, "Journal.write", 2))  # fmt: skip
    assert killed.code == KILLED
    assert command("run", shallow, "-o", tmp_path / "out", *options).code == 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.config["quantization_config"]["desc_act"] is True
    q, k = (checkpoint.quantized(f"model.layers.0.self_attn.{n}_proj") for n in "qk")
    assert q.g_idx is not None and k.g_idx is not None
    assert torch.equal(q.g_idx, k.g_idx)  # as engines that fuse them need
    llm = LLM(tmp_path / "out", "cpu", "float32")
    assert "order of their groups" in llm.linear_report()[0].note
    ids = torch.tensor([[256, 84, 104, 101]])
    with torch.no_grad():
        expected = load_scorer(tmp_path / "out")(ids)
        assert_near(llm.model(ids).logits[0], expected)


def test_groups_of_several_sizes_do_not_run() -> None:
    spec = QuantSpec(4, granularity=Group(2))
    q = rtn_quantize(torch.randn(2, 4), spec, torch.float16, WeightPass().rtn)
    q = q._replace(g_idx=torch.tensor([0, 0, 0, 1], dtype=torch.int32))
    with pytest.raises(UserError, match="groups of 1 to 3 columns"):
        q.by_group()


# refused before any data is read

REFUSED = {
    "unknown": (["--format", "gptqv2"], ("unknown format 'gptqv2'", "did you mean 'gptq_v2'")),
    "act order": (["--act-order", "desc_act"], ("desc_act", "gptq, gptq_v2")),
    "width": (["--format", "awq", "--scheme", "W8A16"], ("awq", "W8A16", "W4A16_ASYM")),
    "activations": (["--format", "gptq", "--scheme", "W8A8"], ("inputs", "compressed-tensors")),
    "zero of 0": (
        ["--format", "gptq", "--scheme", "W4A16_ASYM"],
        ("zero-points of 0", "or W8A16, or", "gptq_v2"),
    ),
    "floats": (["--format", "fp8"], ("fp8", "W4A16", "FP8_BLOCK")),
    "budget": (["--format", "gptq", "--budget", "4.5"], ("budget", "convert")),
}


@pytest.mark.parametrize("options", REFUSED)
def test_formats_that_cannot_hold_a_scheme_are_refused(
    options: str, shallow: Path, command: Commands, tmp_path: Path
) -> None:
    given, parts = REFUSED[options]
    # the text is never looked for
    run = ["run", shallow, "-o", tmp_path / "out", "--calib", tmp_path / "none.txt", *given]
    command(*run).refuses(*parts)
    assert not list(tmp_path.iterdir())


def test_linears_that_do_not_fit_are_refused_by_name(shallow: Path, tmp_path: Path) -> None:
    passes = (
        WeightPass(method="rtn", scheme="W4A16", group_size=32, targets=("re:.*q_proj",)),
        WeightPass(method="rtn", scheme="W4A16", group_size=64, targets=("re:.*k_proj",)),
    )
    with pytest.raises(UserError, match=r"one group size .*compressed-tensors"):
        quantize_model(shallow, tmp_path / "out", Recipe(passes, format="awq"))
    quantize_model(shallow, tmp_path / "out", Recipe(passes, format="gptq"))
    schemes = Checkpoint(tmp_path / "out").schemes
    assert schemes["model.layers.1.self_attn.q_proj"] == scheme_from_name("W4A16", 32)
    assert schemes["model.layers.1.self_attn.k_proj"] == scheme_from_name("W4A16", 64)
    assert len(schemes) == 4


def test_a_recipe_keeps_its_format() -> None:
    recipe = rounded("W4A16", "gptq")
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert "format" not in Recipe().to_dict()
    with pytest.raises(UserError, match="budget"):
        Recipe(format="awq", budget=BudgetSettings(4.5))
