"""Streaming: the bytes that whole weights give, any architecture, resume, FP8 sources, memory."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.model import LayeredModel
from lowbit.calib.shards import Shards
from lowbit.evals.speed import peak_memory
from lowbit.kernels.errors import UserError
from lowbit.quantize import stream_weights
from lowbit.quantize.checkpoint import stream_output
from lowbit.quantize.checkpoint.compress import compress
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.checkpoint.raw import tensor_bytes
from lowbit.quantize.checkpoint.stream_output import StreamOutput
from lowbit.quantize.fp8_source import FP8Source, open_model, open_source
from lowbit.quantize.linear_names import find_linears, fused_peers
from lowbit.quantize.linear_plan import make_plan
from lowbit.quantize.passes.hqq import hqq_quantize
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.passes.settings import HQQSettings, RTNSettings
from lowbit.quantize.prepare import can_stream
from lowbit.quantize.recipe import Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.quantize.spec import scheme_from_name
from lowbit.quantize.stream import stream_quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from .models import hashes
from .runtime_models import FAMILIES, save_tiny

ROWS, COLUMNS = 160, 256  # rows are no whole number of blocks, nor of the chunks below
SCHEMES = [
    "W4A16", "W3A16_ASYM", "W8A16", "W8A8", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16",
    "MXFP4A16", "MXFP8",
]  # fmt: skip
CONFIG = {"model_type": "unheard_of", "num_hidden_layers": 2, "tie_word_embeddings": False}


def write_model(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul_(0.02).bfloat16()


@pytest.fixture(scope="module")
def unheard_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose architecture transformers does not know. Not to be changed."""
    tensors = {
        "model.embed_tokens.weight": normal(40, COLUMNS),
        "model.layers.0.mixer.k_proj.weight": normal(ROWS, COLUMNS, seed=1),
        "model.layers.0.mixer.q_proj.weight": normal(ROWS, COLUMNS, seed=2) * 3,
        "model.layers.0.mixer.k_proj.bias": normal(ROWS),
        "model.layers.0.mixer.conv.weight": normal(8, 1, 4),
        "model.layers.0.norm.weight": normal(COLUMNS),
        "model.layers.0.moe.gate.weight": normal(8, COLUMNS),
        "model.layers.1.moe.experts.7.w1.weight": normal(ROWS, COLUMNS, seed=3),
        "model.layers.2.eh_proj.weight": normal(ROWS, COLUMNS),
        "model.vision_tower.layers.0.fc1.weight": normal(ROWS, COLUMNS),
        "model.scale": torch.tensor(2.0),
        "lm_head.weight": normal(40, COLUMNS),
    }
    return write_model(tmp_path_factory.mktemp("models") / "unheard-of", tensors, CONFIG)


QUANTIZED = [
    "model.layers.0.mixer.k_proj", "model.layers.0.mixer.q_proj",
    "model.layers.1.moe.experts.7.w1",
]  # fmt: skip


def recipe(scheme: str, method: Any = "rtn", search: Any = "minmax") -> Recipe:
    return Recipe((WeightPass(method=method, scheme=scheme, rtn=RTNSettings(search)),))


def assert_equal(stored: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (stored[name].dtype, stored[name].shape) == (tensor.dtype, tensor.shape), name
        assert tensor_bytes(stored[name]) == tensor_bytes(tensor), name


@pytest.mark.parametrize("search", ["minmax", "mse"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stores_what_whole_weights_give(
    scheme: str, search: str, unheard_of: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(stream_weights, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(stream_weights, "SEARCHED_TOGETHER", 64 * COLUMNS)
    monkeypatch.setattr("lowbit.quantize.ranges.CHUNK_ELEMENTS", 64 * COLUMNS)
    stream_quantize(unheard_of, tmp_path / "out", recipe(scheme, search=search))
    original = load_file(unheard_of / "model.safetensors")
    wanted = scheme_from_name(scheme)
    k, q = (original[f"{name}.weight"] for name in QUANTIZED[:2])
    together = rtn_quantize(torch.cat([k, q]), wanted.weights, k.dtype, RTNSettings(search))
    expected = {n: t for n, t in original.items() if n.removesuffix(".weight") not in QUANTIZED}
    for name in QUANTIZED:
        alone = rtn_quantize(
            original[f"{name}.weight"], wanted.weights, k.dtype, RTNSettings(search)
        )
        if scheme == "NVFP4A16" and name in QUANTIZED[:2]:  # q and k share their global scale
            start = QUANTIZED.index(name) * ROWS
            rows = slice(start, start + ROWS)
            alone = together._replace(codes=together.codes[rows], scale=together.scale[rows])
        expected |= compress(name, alone, wanted)
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), expected)
    checkpoint = Checkpoint(tmp_path / "out")
    assert set(checkpoint.schemes) == set(QUANTIZED)
    assert set(checkpoint.config["quantization_config"]["ignore"]) == {
        "lm_head", "model.layers.0.moe.gate", "model.layers.2.eh_proj",
        "model.vision_tower.layers.0.fc1",
    }  # fmt: skip


def test_hqq_streams_too(unheard_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_weights, "CHUNK_ELEMENTS", 1)
    stream_quantize(unheard_of, tmp_path / "out", recipe("W3A16", "hqq"))
    scheme = scheme_from_name("W3A16")
    weight = load_file(unheard_of / "model.safetensors")[f"{QUANTIZED[0]}.weight"]
    stored = Checkpoint(tmp_path / "out").quantized(QUANTIZED[0])
    whole = hqq_quantize(weight, scheme.weights, weight.dtype, HQQSettings())
    assert torch.equal(stored.codes, whole.codes)


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_the_linears_that_the_model_has(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", FAMILIES[family]())
    model = LayeredModel(folder)
    config = json.loads((folder / "config.json").read_text())
    found = find_linears(model.shards.info, config)
    plan = make_plan(model, recipe("W8A16"))
    assert {model.tensor_name(f"{n}.weight") for n in plan.linears} == {
        f"{n}.weight" for n in found.inner
    }
    assert (found.head is None) == (model.head is None)


def test_refuses_what_it_cannot_quantize(unheard_of: Path, tmp_path: Path) -> None:
    weight = {"h.0.c_fc.weight": normal(32, 64), "h.0.c_fc.bias": normal(64)}
    conv1d = write_model(tmp_path / "conv1d", weight, {"model_type": "gpt2"})
    with pytest.raises(UserError, match="transposed linears .* 'h.0.c_fc.weight'"):
        stream_quantize(conv1d, tmp_path / "out", recipe("W8A16"))
    bad = {QUANTIZED[0] + ".weight": normal(64, 64).fill_(torch.nan)}
    broken = write_model(tmp_path / "broken", bad, CONFIG)
    with pytest.raises(UserError, match="k_proj.weight' holds NaN or infinite.* kept in .*partial"):
        stream_quantize(broken, tmp_path / "out", recipe("W8A16"), restart=True)
    stream_quantize(unheard_of, tmp_path / "w4", recipe("W4A16"))
    with pytest.raises(UserError, match="already quantized; .* fine-grained FP8"):
        stream_quantize(tmp_path / "w4", tmp_path / "again", recipe("W8A16"))
    assert not can_stream(recipe("FP8"))  # static scales of activations need data
    assert not can_stream(recipe("NVFP4"))
    assert not can_stream(recipe("W4A16", "gptq"))


def test_peers_that_engines_fuse() -> None:
    names = ["a.q_proj", "a.o_proj", "a.v_proj", "b.q_proj", "b.up_proj", "b.gate_proj"]
    assert fused_peers(names) == [
        ["a.q_proj", "a.v_proj"], ["a.o_proj"], ["b.q_proj"], ["b.up_proj", "b.gate_proj"],
    ]  # fmt: skip


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", ["before a record", "in a tensor", "before the rename"])
def test_a_killed_run_ends_in_the_same_bytes(
    place: str, unheard_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_output, "SYNC_BYTES", 1)
    monkeypatch.setattr(stream_weights, "CHUNK_ELEMENTS", 1)
    run = functools.partial(
        stream_quantize, unheard_of, recipe=recipe("W4A16"), max_shard_size="50KB"
    )
    run(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2
    what, calls = {
        "before a record": ("finish", 6),
        "in a tensor": ("append", 9),
        "before the rename": ("close", 1),
    }[place]

    with monkeypatch.context() as patch:
        left = calls
        original: Callable[..., None] = getattr(StreamOutput, what)

        def killed(self: StreamOutput, *args: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            original(self, *args)

        patch.setattr(StreamOutput, what, killed)
        with pytest.raises(Killed):
            run(tmp_path / "out")
    with (tmp_path / "out.partial" / "finished.txt").open("a") as record:
        record.write("model.layers.0.mi")  # cut by the kill
    with pytest.raises(UserError, match="unfinished run of other inputs"):
        stream_quantize(unheard_of, tmp_path / "out", recipe("W8A16"))
    with pytest.raises(UserError, match="max_shard_bytes: 50000 there, 60000 here"):
        stream_quantize(unheard_of, tmp_path / "out", recipe("W4A16"), max_shard_size="60KB")
    result = run(tmp_path / "out")
    assert 0 < result.resumed_layers <= 13
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


# FP8 checkpoints as input


def fine_grained(folder: Path, block: tuple[int, int] | None) -> tuple[Path, Tensor]:
    """A Hugging Face FP8 checkpoint, and what its only linear stands for."""
    codes = (normal(300, 200) * 4000).to(torch.float8_e4m3fn)
    high, wide = block or (300, 200)
    scale = torch.rand(math.ceil(300 / high), math.ceil(200 / wide)) + 0.1
    spread = scale.repeat_interleave(high, 0)[:300].repeat_interleave(wide, 1)[:, :200]
    tensors = {
        "model.layers.0.mlp.up_proj.weight": codes,
        "model.layers.0.mlp.up_proj.weight_scale_inv": scale if block else scale.reshape(()),
        "model.norm.weight": normal(200),
    }
    quantization = {"quant_method": "fp8", "weight_block_size": list(block) if block else None}
    config = {**CONFIG, "dtype": "bfloat16", "quantization_config": quantization}
    return write_model(folder, tensors, config), (codes.float() * spread).bfloat16()


@pytest.mark.parametrize("block", [(128, 128), (64, 32), None], ids=str)
def test_fine_grained_fp8_is_dequantized(block: tuple[int, int] | None, tmp_path: Path) -> None:
    folder, expected = fine_grained(tmp_path / "fp8", block)
    source = open_source(folder)
    assert isinstance(source, FP8Source)
    name = "model.layers.0.mlp.up_proj.weight"
    assert set(source.names()) == {name, "model.norm.weight"}
    assert (source.info[name].dtype, source.info[name].shape) == (torch.bfloat16, (300, 200))
    assert torch.equal(source.get(name), expected)
    checkpoint = Checkpoint(folder)
    values = checkpoint.dense_weight("model.layers.0.mlp.up_proj", torch.bfloat16)
    assert torch.equal(values, expected)
    assert [s.weights.block for s in checkpoint.schemes.values()] == ([block] if block else [])
    for start, stop in ((0, 300), (1, 2), (127, 257), (130, 300)):
        assert torch.equal(source.get_rows(name, start, stop), expected[start:stop])


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_quantizes_a_compressed_fp8_checkpoint_as_its_values(scheme: str, tmp_path: Path) -> None:
    original = save_tiny(tmp_path / "original", FAMILIES["llama"]())
    stream_quantize(original, tmp_path / "fp8", recipe(scheme))
    values = tmp_path / "values"
    source = open_source(tmp_path / "fp8")
    assert isinstance(source, FP8Source)
    config = json.loads((original / "config.json").read_text())
    write_model(values, {n: source.get(n) for n in source.names()}, config)
    for folder in ("fp8", "values"):
        stream_quantize(tmp_path / folder, tmp_path / f"{folder}-w4", recipe("W4A16"))
    stored = [load_file(tmp_path / f"{f}-w4" / "model.safetensors") for f in ("fp8", "values")]
    assert_equal(*stored)
    config = json.loads((tmp_path / "fp8-w4" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    model = open_model(tmp_path / "fp8", torch.float32, "cpu")
    assert set(make_plan(model, recipe("W4A16")).linears)


def test_calibrates_on_an_fp8_checkpoint(tmp_path: Path, story: Path) -> None:
    from lowbit.quantize.recipe import Calibration

    original = save_tiny(tmp_path / "original", FAMILIES["llama"]())
    quantize_model(original, tmp_path / "fp8", recipe("FP8_BLOCK"))
    taken_by = WeightPass(ignore=("re:.*down_proj",))
    rows = Calibration(str(story), 2, 32)
    quantize_model(tmp_path / "fp8", tmp_path / "w4", Recipe((taken_by,), rows))
    down = "model.layers.0.mlp.down_proj.weight"
    stored = Shards(tmp_path / "w4")
    assert torch.equal(stored.get(down), open_source(tmp_path / "fp8").get(down))
    assert not [n for n in stored.names() if n.endswith("down_proj.weight_scale")]


@pytest.mark.parametrize("damage", ["no scale", "a scale of another shape", "no FP8"])
def test_damaged_fp8_checkpoints_are_refused(damage: str, tmp_path: Path) -> None:
    folder, _ = fine_grained(tmp_path / "fp8", (128, 128))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if damage == "no scale":
        del tensors[f"{name}_scale_inv"]
    elif damage == "no FP8":
        tensors[name] = tensors[name].bfloat16()
    else:
        tensors[f"{name}_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"up_proj.*download the model again"):
        stream_quantize(folder, tmp_path / "out", recipe("W8A16"))


@pytest.mark.skipif(sys.platform != "linux", reason="a peak is measured anew through /proc")
def test_a_tensor_larger_than_the_memory_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 MB of weights in one tensor, converted in half of that."""
    monkeypatch.setattr(stream_weights, "CHUNK_ELEMENTS", 1 << 19)
    monkeypatch.setattr("lowbit.calib.shards.MAPPED_BYTES", 1 << 22)
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.zeros(48 * 1024, 1024).bfloat16()}
    folder = write_model(tmp_path / "model", tensors, CONFIG)
    del tensors
    stream_quantize(folder, tmp_path / "warm", recipe("W8A8"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    stream_quantize(folder, tmp_path / "out", recipe("W8A8"))
    assert peak_memory() - resident < 48 << 20
