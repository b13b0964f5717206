"""A quantized cache at work: runtime, evals, calibration and checkpoint agree."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from lowbit.calib.model import LayeredModel, forward_layer
from lowbit.evals.kv_fake import FakeQuantizedKV
from lowbit.evals.scorer import load_scorer
from lowbit.kernels.errors import UserError
from lowbit.kernels.kv_quant import fake_quantize_kv
from lowbit.quantize.checkpoint.kv_config import (
    KVScales,
    KVStorage,
    scale_tensors,
    with_kv_cache,
)
from lowbit.quantize.cli.eval import evaluate
from lowbit.quantize.kv_names import kv_spec_from_name
from lowbit.quantize.passes.kv_cache import KVObserver, choose_static_scale
from lowbit.quantize.passes.settings import KVCacheSettings
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.kv_cache import KVCache, cache_keyword
from lowbit.runtime.kv_formats import kv_format
from lowbit.runtime.rope import RopeProbe
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from .runtime_models import FAMILIES, OTHERS, VOCAB, save_tiny

FORMATS = ("int8", "fp8_dynamic", "int4", "int4_hadamard", "k4v2_g8", "int3_postrope", "k16v4")
LENGTH = 45  # of a prompt: a whole group of tokens and a part of the next


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("kv") / "llama", FAMILIES["llama"]())


@pytest.fixture(scope="module")
def stories() -> Path:
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained model to run")
    return Path(folder) / "stories260k"


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config({**FAMILIES, **OTHERS}[family]()).eval()


def token_ids(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def fake_logits(model: Any, ids: Tensor, storage: KVStorage) -> Tensor:
    return model(input_ids=ids, **FakeQuantizedKV(model, storage).arguments()).logits[0]


@torch.inference_mode()
def cached_logits(model: Any, ids: Tensor, storage: KVStorage, prompt: int) -> Tensor:
    """Logits at every token: of the prompt in one pass, then token by token."""
    probe = RopeProbe(model)
    cache = KVCache(model.config, 1, ids.shape[1], storage, probe)
    logits = []
    cache.place_prompt(0, 0)
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        if begin:
            cache.place_decode(begin)
        step = model(input_ids=ids[:, begin:end], use_cache=True, **{cache_keyword(model): cache})
        logits.append(step.logits[0])
    probe.close()
    return torch.cat(logits)


@pytest.mark.parametrize("name", FORMATS)
def test_the_runtimes_cache_gives_what_the_evals_measure(name: str) -> None:
    model, ids = tiny("llama"), token_ids(LENGTH + 2)  # no group of tokens gets whole by decoding
    storage = KVStorage(kv_spec_from_name(name), {})
    measured = fake_logits(model, ids, storage)
    assert torch.allclose(cached_logits(model, ids, storage, LENGTH), measured, atol=2e-4)
    with torch.inference_mode():
        plain = model(input_ids=ids).logits[0]
    assert float((measured - plain).abs().max()) > 1e-3  # something was quantized


@pytest.mark.parametrize("family", sorted({*FAMILIES, *OTHERS} - {"llama"}))
def test_it_does_for_every_family(family: str) -> None:
    model, ids = tiny(family), token_ids(LENGTH + 3)
    storage = KVStorage(kv_spec_from_name("int4"), {})
    assert torch.allclose(
        cached_logits(model, ids, storage, LENGTH), fake_logits(model, ids, storage), atol=5e-4
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_layers_that_are_skipped_stay_as_they_are(family: str) -> None:
    model, ids = tiny(family), token_ids(40)
    with torch.inference_mode():
        plain = model(input_ids=ids).logits[0]
    both = KVStorage(kv_spec_from_name("int4", (0, 1)), {})
    assert torch.allclose(fake_logits(model, ids, both), plain, atol=1e-4)
    one = fake_logits(model, ids, KVStorage(kv_spec_from_name("int4", (1,)), {}))
    every = fake_logits(model, ids, KVStorage(kv_spec_from_name("int4"), {}))
    assert 0 < float((one - plain).norm()) < float((every - plain).norm())


@pytest.mark.parametrize("name", ["int8", "int4", "int4_hadamard"])
def test_a_request_gets_the_same_alone_and_in_a_batch(llama: Path, name: str) -> None:
    llm = LLM(llama, dtype="float32", kv_cache_dtype=name)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [token_ids(n)[0].tolist() for n in (3, 33, 60)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate([prompt], params, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_codes_are_what_the_cache_holds() -> None:
    model = tiny("llama")
    sizes = {}
    for name in ("model", "int8", "int4", "int4_hadamard", "k4v2"):
        storage = None if name == "model" else KVStorage(kv_spec_from_name(name), {})
        cache = KVCache(model.config, 1, 96, storage, RopeProbe(model))
        cache.place_prompt(0, 0)
        with torch.inference_mode():
            model(input_ids=token_ids(96), use_cache=True, **{cache_keyword(model): cache})
        sizes[name] = cache.nbytes
    values = 2 * 2 * 2 * 96 * 16  # layers, keys and values, heads, tokens, head_dim
    assert sizes["model"] == 4 * values
    assert sizes["int8"] == values * (8 + 16 / 16) / 8
    assert sizes["int4_hadamard"] == values * (4 + 32 / 16) / 8
    assert sizes["int4"] == values * (4 + (32 / 32 + 32 / 16) / 2) / 8
    assert sizes["int4"] - sizes["k4v2"] == values * 1 / 8


def test_a_trained_model_says_the_same_with_eight_bits(stories: Path) -> None:
    """Token for token, up to where the unquantized model itself hardly prefers one."""
    prompt, params = "Lily and Ben", SamplingParams(temperature=0, max_tokens=60)
    plain = LLM(stories, dtype="float32")
    want = plain.generate([prompt], params, use_tqdm=False)[0]
    got = LLM(stories, dtype="float32", kv_cache_dtype="int8").generate(
        [prompt], params, use_tqdm=False
    )[0]
    ids = [*want.prompt_token_ids, *want.outputs[0].token_ids]
    best = plain.logits(torch.tensor([ids]))[0, len(want.prompt_token_ids) - 1 : -1].topk(2).values
    close = (best[:, 0] - best[:, 1] < 0.2).nonzero()
    sure = int(close[0]) if len(close) else len(best)
    assert sure > 30
    assert got.outputs[0].token_ids[:sure] == want.outputs[0].token_ids[:sure]


def observed_scales(folder: Path, name: str, search: Any = "mse") -> dict[str, KVScales]:
    """Name of the attention module -> its scales, from a few random rows."""
    model = LayeredModel(folder)
    observer = KVObserver(
        kv_spec_from_name(name), KVCacheSettings(name, scale_search=search), model.config
    )
    scales: dict[str, KVScales] = {}
    rows = torch.randint(0, VOCAB, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        (calls,) = model.layer_calls(rows, 4)
        for layer_name, call in calls.items():
            with model.loaded(layer_name) as layer, observer.watching(layer_name, layer):
                plain = forward_layer(layer, call)
            scales |= observer.take(layer_name)
            with model.loaded(layer_name) as layer:
                assert torch.equal(forward_layer(layer, call), plain)  # looking changes nothing
    return scales


@pytest.mark.parametrize("name", ["fp8", "int8_head"])
def test_calibrated_scales_are_stored_and_used(llama: Path, tmp_path: Path, name: str) -> None:
    out = Path(shutil.copytree(llama, tmp_path / "out"))
    scales = observed_scales(llama, name)
    assert sorted(scales) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    tensors = load_file(llama / "model.safetensors")
    for attention, found in scales.items():
        tensors |= scale_tensors(attention, found, torch.float32)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    written = with_kv_cache(config, kv_spec_from_name(name), "0")
    (out / "config.json").write_text(json.dumps(written))

    storage = KVStorage(kv_spec_from_name(name), dict(enumerate(scales.values())))
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    ids = token_ids(50)
    want = fake_logits(model, ids, storage)
    assert torch.allclose(load_scorer(out)(ids), want, atol=1e-5)
    llm = LLM(out, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=1)
    token = llm.generate([ids[0].tolist()], params, use_tqdm=False)[0].outputs[0].token_ids[0]
    assert token == int(want[-1].argmax())
    with pytest.raises(UserError, match="calibrated and stored by quantize run --kv"):
        LLM(llama, kv_cache_dtype=name)


def test_the_range_saturates_nothing_and_the_search_errs_less(llama: Path) -> None:
    whole = observed_scales(llama, "int8_static", "minmax")
    searched = observed_scales(llama, "int8_static")
    for name, scales in searched.items():
        assert scales.key is not None and scales.key <= whole[name].key
    x = torch.randn(2, 512, 16, generator=torch.Generator().manual_seed(3))
    x[0, 0, 0] = 30
    part = kv_spec_from_name("int8_static").key
    assert part is not None
    fmt = kv_format(part, rotate=False, head_dim=16)._replace(num_bits=4)
    errors = []
    for search in (False, True):
        scale = choose_static_scale(x, x.abs().amax((1, 2)), fmt.elements, False, search)
        assert search or float(scale) * fmt.elements.highest == pytest.approx(30)
        errors.append(float((fake_quantize_kv(x[None], fmt, scale)[0] - x).square().sum()))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int5x", "unknown KV format 'int5x'"),
        ("int4_hadamard_g7", "groups of 7 channels do not divide a head of 16"),
    ],
)
def test_a_format_that_does_not_suit_is_refused(llama: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm = LLM(llama, kv_cache_dtype=name)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)


def test_eval_measures_a_cache_without_a_checkpoint(llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    app = typer.Typer()
    app.command()(evaluate)
    common = [str(llama), "--base", str(llama), "--text", str(text), "--ctx", "64", "--json"]
    divergence = {}
    for name in ("auto", "int8", "int4"):
        result = CliRunner().invoke(app, [*common, "--kv", name])
        row = json.loads(result.stdout)["rows"][1]
        divergence[name] = row["divergence"]["kld_mean"]
        assert (row["kv"] is None) is (name == "auto")
    assert divergence["auto"] < 1e-9 < divergence["int8"] < divergence["int4"]
