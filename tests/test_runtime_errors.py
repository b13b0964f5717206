"""What a user can get wrong ends in one UserError that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, SamplingParams
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from .runtime_models import FAMILIES, VOCAB, quantize_folder, save_tiny, with_config

TENSORS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module")
def quantized(original, tmp_path_factory) -> Path:
    return quantize_folder(original, tmp_path_factory.mktemp("quantized") / "w4", "W4A16_ASYM")


@pytest.fixture(scope="module")
def llm(original) -> LLM:
    return LLM(original)


def changed(source: Path, out: Path, change) -> Path:
    """A copy of `source` whose dict of tensors went through `change`."""
    shutil.copytree(source, out)
    tensors = load_file(source / TENSORS)
    change(tensors)
    save_file(tensors, out / TENSORS)
    return out


def test_folders_that_are_no_causal_lm(original, tmp_path):
    with pytest.raises(UserError, match="no such model folder"):
        LLM(tmp_path / "absent")
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(UserError, match=r"encoder-decoder.*t5"):
        LLM(tmp_path / "t5")
    unknown = with_config(shutil.copytree(original, tmp_path / "new"), model_type="llama99")
    with pytest.raises(UserError, match="llama99"):
        LLM(unknown)
    vision = with_config(shutil.copytree(original, tmp_path / "vit"), model_type="vit")
    with pytest.raises(UserError, match="not a causal language model.*'vit'"):
        LLM(vision)


def test_checkpoints_that_do_not_fit_the_model(original, tmp_path):
    norm = "model.layers.1.input_layernorm.weight"
    bad = changed(original, tmp_path / "missing", lambda t: t.pop(norm))
    with pytest.raises(UserError, match=f"no tensor for the parameter '{norm}'"):
        LLM(bad)
    extra = {"model.layers.0.adapter.weight": torch.ones(2)}
    bad = changed(original, tmp_path / "extra", lambda t: t.update(extra))
    with pytest.raises(UserError, match=r"1 tensors.*no place for.*adapter\.weight"):
        LLM(bad)
    bad = changed(original, tmp_path / "shape", lambda t: t.update({norm: torch.ones(3)}))
    with pytest.raises(UserError, match=rf"'{norm}' has shape \(3,\).*asks for \(64,\)"):
        LLM(bad)
    codes = {norm: torch.ones(64, dtype=torch.int8)}
    bad = changed(original, tmp_path / "codes", lambda t: t.update(codes))
    with pytest.raises(UserError, match="int8 with no scale"):
        LLM(bad)
    nan = {norm: torch.full((64,), torch.nan)}
    bad = changed(original, tmp_path / "nan", lambda t: t.update(nan))
    with pytest.raises(UserError, match="not finite"):
        LLM(bad).generate("x")


def test_a_tied_head_with_other_values_is_not_tied(original, tmp_path):
    head = torch.randn(VOCAB, 64)
    folder = changed(original, tmp_path / "head", lambda t: t.update({"lm_head.weight": head}))
    model = LLM(folder, dtype="float32").model
    torch.testing.assert_close(model.lm_head(torch.eye(64)).T, head)  # the weight as it is held
    assert not torch.equal(model.model.embed_tokens.weight, head)


def test_damaged_quantized_checkpoints(quantized, tmp_path):
    def expect(name: str, change, message: str) -> None:
        with pytest.raises(UserError, match=message):
            LLM(changed(quantized, tmp_path / name, change))

    scale, zero = f"{Q_PROJ}.weight_scale", f"{Q_PROJ}.weight_zero_point"
    expect("scale", lambda t: t.update({scale: torch.ones(64, 3)}), r"\(64, 3\)")
    expect("no_zero", lambda t: t.pop(zero), "weight_zero_point")
    columns = {f"{Q_PROJ}.weight_shape": torch.tensor([64, 32])}
    expect("columns", lambda t: t.update(columns), "weight_packed has shape")

    def move(tensors: dict) -> None:
        for name in [n for n in tensors if n.startswith(Q_PROJ)]:
            tensors[name.replace("q_proj", "x_proj")] = tensors.pop(name)

    expect("renamed", move, "quantized 'model.layers.0.self_attn.x_proj'")


@pytest.mark.parametrize(
    ("side", "changes", "named"),
    [
        ("input", {"symmetric": False}, "zero-point"),
        ("input", {"dynamic": False, "strategy": "group", "group_size": 32}, "static activation"),
        ("output", {}, "output activations"),
    ],
    ids=["zero-points", "static groups", "outputs"],
)
def test_activations_that_are_not_run(quantized, tmp_path, side, changes, named):
    folder = shutil.copytree(quantized, tmp_path / "activations")
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    tokens = {"num_bits": 8, "strategy": "token", "dynamic": True}
    group[f"{side}_activations"] = {**tokens, **changes}
    with_config(folder, quantization_config=quantization)
    with pytest.raises(UserError, match=named):
        LLM(folder)


def test_devices_dtypes_and_kernels(original, quantized):
    with pytest.raises(UserError, match="dtype must be auto or one of.*'int8'"):
        LLM(original, dtype="int8")
    with pytest.raises(UserError, match="device 'tpu'"):
        LLM(original, device="tpu")
    with pytest.raises(UserError, match="'int4pack_cpu' cannot run.*bfloat16, not float32"):
        LLM(quantized, "cpu", "float32", linear_kernel="int4pack_cpu")
    with pytest.raises(UserError, match="max_num_seqs must be at least 1, got 0"):
        LLM(original, max_num_seqs=0)
    with pytest.raises(UserError, match="max_model_len.*256, got 300"):
        LLM(original, max_model_len=300)
    forced = LLM(quantized, "cpu", linear_kernel="dequant")
    assert {r.kernel for r in forced.linear_report()} == {"dequant"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "no prompt"),
        ([[]], "prompt is empty"),
        ([VOCAB], f"token id {VOCAB} is out of the vocabulary.*{VOCAB - 1}"),
        ([[3, -1]], "token id -1"),
        ([0] * 256, "256 tokens.*256"),
        ([3.5], "got float"),
        ({"text": "x"}, "'prompt_token_ids'"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_prompts(llm, prompt, message):
    with pytest.raises(UserError, match=message):
        llm.generate(prompt)


def test_params_for_other_prompts(llm):
    with pytest.raises(UserError, match="2 prompts need as many sampling_params.*got 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(UserError, match="one prompt, got 2"):
        list(llm.stream(["a", "b"]))


def test_without_tokenizer_or_template(original, llm, tmp_path):
    bare = save_tiny(tmp_path / "bare", FAMILIES["llama"](), tokenizer=False)
    plain = LLM(bare, dtype="float32")
    with pytest.raises(UserError, match="no tokenizer"):
        plain.generate("text")
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        plain.generate([1, 2], SamplingParams(stop="x"))
    out = plain.generate([1, 2], SamplingParams(max_tokens=3))[0].outputs[0]
    assert len(out.token_ids) <= 3 and out.text == ""
    with pytest.raises(UserError, match="no chat template"):
        plain.chat([{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="conversation is empty"):
        llm.chat([])
