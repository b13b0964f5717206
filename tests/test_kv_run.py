"""`quantize run --kv`: the cache's format and its calibrated scales end up in the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.quantize.checkpoint.kv_config import OWN_KEY, read_kv_storage
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.runtime import LLM, SamplingParams

from .command import Commands


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_the_cache_alone_with_calibrated_scales(
    command: Commands, shallow: Path, calibration: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "kv"
    run = ["run", shallow, "-o", out, "--method", "none", "--kv", "int8_static", *calibration]
    outcome = command(*run)
    assert outcome.code == 0, outcome.stderr
    quantization = config_of(out)["quantization_config"]
    assert quantization["config_groups"] == {}
    assert quantization["kv_cache_scheme"]["dynamic"] is False
    checkpoint, original = Checkpoint(out), Checkpoint(shallow)
    added = set(checkpoint.shards.names()) - set(original.shards.names())
    assert added == {f"model.layers.{i}.self_attn.{part}_scale" for i in range(2) for part in "kv"}
    for name in original.shards.names():  # the weights are the original's
        assert torch.equal(checkpoint.shards.get(name), original.shards.get(name))
    storage = read_kv_storage(checkpoint.config, checkpoint.shards)
    assert storage is not None and len(storage.scales) == 2
    assert command("eval", out, "--base", shallow, "--ctx", "64", "--windows", "1", "--text",
                   calibration[1], "--json").code == 0  # fmt: skip
    again = tmp_path / "again"
    assert command(*[again if a == out else a for a in run]).code == 0
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_format_of_our_own_beside_weights(
    command: Commands, shallow: Path, calibration: list[str], tmp_path: Path, method: str
) -> None:
    out = tmp_path / method
    data = calibration if method == "gptq" else []
    outcome = command("run", shallow, "-o", out, "--method", method, "--kv", "k4v2", *data)
    assert outcome.code == 0, outcome.stderr
    words = "K int4 by channel of 32 tokens, before RoPE; V int2 by token, rotated"
    assert f"cache: {words}\n" in outcome.stderr
    planned = command("plan", shallow, "--method", method, "--kv", "k4v2", "--no-timing", *data)
    assert words in planned.stdout
    config = config_of(out)
    assert config[OWN_KEY]["key"]["num_bits"] == 4 and config[OWN_KEY]["value"]["num_bits"] == 2
    assert config["quantization_config"]["kv_cache_scheme"] is None
    (output,) = LLM(out).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4


def test_nothing_to_do_is_refused(command: Commands, shallow: Path, tmp_path: Path) -> None:
    outcome = command("run", shallow, "-o", tmp_path / "out", "--method", "none")
    assert outcome.code == 2 and "--kv" in outcome.stderr


@pytest.mark.parametrize("method", ["none", "rtn"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("int4_hadamard_g7",), "groups of 7 channels do not divide a head of 16"),
        (("k16v4_g32",), "groups of 32 channels do not divide a head of 16"),
        (
            ("int8", "--set", "kv_cache.skip_layers=[2]"),
            "names layer 2, but the model's are 0 to 1",
        ),
        (("int8", "--set", "kv_cache.skip_layers=[0, 1]"), "names every layer"),
    ],
)
def test_a_format_that_does_not_suit_the_model_is_refused(
    command: Commands,
    shallow: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
    method: str,
) -> None:
    run = ("run", shallow, "-o", tmp_path / "out", "--method", method, "--kv", *options)
    command(*run).refuses(message)
    assert not list(tmp_path.iterdir())
