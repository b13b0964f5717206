"""GPTQModel and transformers read what lowbit writes, and lowbit what GPTQModel writes.

GPTQModel is not among the packages that the tests need. Name a Python that has it:

    python -m venv gptqmodel && gptqmodel/bin/pip install torch==2.13.0 setuptools wheel ninja numpy
    BUILD_CUDA_EXT=0 gptqmodel/bin/pip install --no-build-isolation "gptqmodel==7.6.*" optimum
    LOWBIT_GPTQMODEL=gptqmodel/bin/python pytest -m slow tests/test_gptqmodel.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lowbit.quantize import convert
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.passes.settings import GPTQSettings
from lowbit.quantize.recipe import Calibration, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.runtime import LLM
from safetensors.torch import load_file

from .models import deep_llama
from .runtime_models import fake_quantized

PYTHON = os.environ.get("LOWBIT_GPTQMODEL") or (
    sys.executable if importlib.util.find_spec("gptqmodel") else None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="LOWBIT_GPTQMODEL names no Python with gptqmodel"),
]
IDS = [1, 2, 3, 4, 5, 60, 70, 116, 104, 101]  # as in gptqmodel_peer.py
HALF = 2.0**-11  # a weight rounded to float16


def peer(*arguments: str | Path) -> None:
    script = Path(__file__).with_name("gptqmodel_peer.py")
    done = subprocess.run(
        [str(PYTHON), str(script), *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_llama(tmp_path_factory.mktemp("models") / "llama", layers=2)


def rounded(scheme: str, group_size: int | None = None, **where: tuple[str, ...]) -> WeightPass:
    return WeightPass(method="rtn", scheme=scheme, group_size=group_size, **where)  # type: ignore


def recipes(story: Path) -> dict[str, Recipe]:
    text = Calibration(str(story), 4, 32)
    desc_act = WeightPass(scheme="W4A16", gptq=GPTQSettings(act_order="desc_act"))
    mixed = (
        rounded("W8A16", 32, targets=("re:.*self_attn",)),
        rounded("W4A16", 32, targets=("re:.*up_proj", "re:.*down_proj")),
    )
    partly = rounded("W4A16", 32, ignore=("re:.*gate_proj",))
    return {
        "gptq, 4 bits": Recipe((rounded("W4A16"),), format="gptq"),
        "gptq, 3 bits": Recipe((rounded("W3A16"),), format="gptq"),
        "gptq, 2 bits": Recipe((rounded("W2A16"),), format="gptq"),
        "gptq, 8 bits a channel": Recipe((rounded("W8A16"),), format="gptq"),
        "gptq, desc_act": Recipe((desc_act,), text, format="gptq"),
        "gptq, mixed": Recipe(mixed, format="gptq"),
        "gptq, partly": Recipe((partly,), format="gptq"),
        "gptq_v2, asymmetric": Recipe((rounded("W4A16_ASYM"),), format="gptq_v2"),
        "awq": Recipe((rounded("W4A16_ASYM"),), format="awq"),
    }


NOT_BY_TRANSFORMERS = ("gptq, mixed", "gptq, mixed to gptq_v2")
NAMES = list(recipes(Path()))


@pytest.fixture(scope="module")
def ours(model: Path, story: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our checkpoints by name, each with what the peer made of it beside it."""
    folder = tmp_path_factory.mktemp("ours")
    for name, recipe in recipes(story).items():
        quantize_model(model, folder / name, recipe)
    for source, to in (("gptq, mixed", "gptq_v2"), ("awq", "gptq_v2"), ("gptq, 4 bits", "awq")):
        convert(folder / source, folder / f"{source} to {to}", to)
    made = {path.name: path for path in sorted(folder.iterdir())}
    peer("read", *made.values())
    peer("load", *(p for name, p in made.items() if name not in NOT_BY_TRANSFORMERS))
    return made


@pytest.mark.parametrize("way", ["read", "load"], ids=["GPTQModel", "transformers"])
@pytest.mark.parametrize(
    "name", [*NAMES, "gptq, mixed to gptq_v2", "awq to gptq_v2", "gptq, 4 bits to awq"]
)
def test_it_reads_what_we_write(name: str, way: str, model: Path, ours: dict[str, Path]) -> None:
    if way == "load" and name in NOT_BY_TRANSFORMERS:
        pytest.skip("transformers' loader of GPTQ (optimum) knows one width alone")
    folder = ours[name]
    found, checkpoint = load_file(f"{folder}.{way}.safetensors"), Checkpoint(folder)
    logits = found.pop("logits")
    assert {k.removeprefix("weight ") for k in found} == set(checkpoint.schemes)
    for key, weight in found.items():
        true = checkpoint.dense_weight(key.removeprefix("weight "))
        if way == "read":
            assert bool(((weight - true).abs() <= HALF * true.abs()).all()), key
        else:  # transformers' choice of kernel is in bfloat16
            assert (weight - true).norm() < 0.01 * true.norm(), key
    with torch.no_grad():
        expected = fake_quantized(model, folder)(torch.tensor([IDS])).logits
    assert (logits - expected).norm() < (0.005 if way == "read" else 0.03) * expected.norm()


WRITTEN = {
    "symmetric": {"bits": 4, "group_size": 32},
    "desc_act": {"bits": 4, "group_size": 32, "desc_act": True},
    "asymmetric": {"bits": 4, "group_size": 32, "sym": False},
    "8 bits": {"bits": 8, "group_size": 32},
    "3 bits": {"bits": 3, "group_size": 32},
    "exceptions": {"bits": 4, "group_size": 32, "dynamic": {
        r"+:.*down_proj": {"bits": 8}, r"-:.*\.0\.self_attn\.o_proj": {},
    }},
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GPTQModel's checkpoints by name, each with what it makes of it beside it."""
    folder = tmp_path_factory.mktemp("theirs")
    options = [(folder / name, json.dumps(o)) for name, o in WRITTEN.items()]
    peer("quantize", model, *(argument for pair in options for argument in pair))
    peer("read", *(path for path, _ in options))
    return {path.name: path for path, _ in options}


@pytest.mark.parametrize("name", WRITTEN)
def test_we_read_what_it_writes(name: str, theirs: dict[str, Path], tmp_path: Path) -> None:
    folder = theirs[name]
    found, checkpoint = load_file(f"{folder}.read.safetensors"), Checkpoint(folder)
    assert checkpoint.warnings == []
    assert len(checkpoint.schemes) == (13 if name == "exceptions" else 14)
    for module in checkpoint.schemes:
        weight, true = found[f"weight {module}"], checkpoint.dense_weight(module)
        assert bool(((weight - true).abs() <= HALF * true.abs()).all()), module
    llm = LLM(folder, "cpu", "float32")
    with torch.no_grad():
        logits = llm.model(torch.tensor([IDS])).logits
    assert (found["logits"] - logits).norm() < 0.005 * logits.norm()
    back = convert(folder, tmp_path / "again", "gptq_v2")
    assert back.exact
