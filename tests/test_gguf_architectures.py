"""Every architecture: against llama.cpp's converter, through llama.cpp itself, and back.

What differs from the converter is listed here and in docs/architectures.md, and nothing else may.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lowbit.evals.llamacpp import LlamaCpp, available
from lowbit.quantize.checkpoint.compress import compress
from lowbit.quantize.checkpoint.ct_config import config_from_schemes
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.gguf import vocab
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.hf_vocab import read_vocab
from lowbit.quantize.gguf.metadata import short_count
from lowbit.quantize.gguf.to_hf import gguf_to_hf
from lowbit.quantize.spec import scheme_from_name
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import gguf_converter
from .gguf_converter import RECORD, convert, data, summary
from .gguf_models import shared_data
from .gguf_zoo import ENDS, SPARE_ROWS, ZOO, make_member
from .runtime_models import round_to_nearest

QUICK = ("mixtral", "gemma3")  # of those whose tokenizers load quickly
GELU = ("gemma2", "gemma3", "starcoder2", "gpt2")  # which llama.cpp looks up in float16
SLOW = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ZOO]
OURS_ALONE = {  # said where the converter leaves it to llama.cpp's default
    "general.quantized_by", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix",
}  # fmt: skip
THEIRS_ALONE = {"tokenizer.ggml.add_sep_token"}  # of pairs of texts
OTHERWISE = {"general.name"}  # the folder's name as it is
OTHERWISE_IN = {
    "gemma2": {"tokenizer.ggml.add_space_prefix"},  # as the tokenizer has it; theirs is a constant
    "gemma3": {"tokenizer.ggml.add_space_prefix"},
    "phi3": {"tokenizer.ggml.scores", "tokenizer.ggml.token_type"},  # of <unk>, <s> and </s>
    "phi3-longrope": {"tokenizer.ggml.scores", "tokenizer.ggml.token_type"},
}
needs_llama_cpp = pytest.mark.skipif(
    not available(), reason="llama.cpp (xllamacpp) is not installed"
)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def differing(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    """The keys that differ although they should not."""
    listed = OTHERWISE | OTHERWISE_IN.get(name, set())
    found = {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)} - listed
    found -= {k for k in found & OURS_ALONE if k not in theirs}
    return found - {k for k in found & THEIRS_ALONE if k not in ours}


def without_rows(found: dict[str, Any], rows: int) -> dict[str, Any]:
    """A summary in which no number tells how many tokens there are."""
    tensors = {
        name: [kind, ["rows" if n == rows else n for n in shape]]
        for name, (kind, shape) in found["tensors"].items()
    }
    keys = {
        k: v
        for k, v in found["keys"].items()
        if not k.startswith("tokenizer.") and not k.endswith((".vocab_size", ".size_label"))
    }
    return {"keys": keys, "tensors": tensors}


@pytest.mark.parametrize("name", ZOO)
def test_keys_and_tensors_are_the_converter_s(
    tmp_path: Path, record: dict[str, Any], name: str
) -> None:
    """Types, names, shapes and values, with a small vocabulary in place of the recorded one."""
    export_gguf(make_member(name, tmp_path / "model", small=True), tmp_path / "m.gguf", "F16",
                progress=False)  # fmt: skip
    found = summary(tmp_path / "m.gguf")
    shapes = (s["tensors"]["token_embd.weight"][1][0] for s in (found, record[name]))
    ours, theirs = (without_rows(s, n) for s, n in zip((found, record[name]), shapes, strict=True))
    assert differing(name, ours["keys"], theirs["keys"]) == set()
    assert ours["tensors"] == theirs["tensors"]


@pytest.mark.parametrize("name", ["llama", "llama-spm", "qwen2", "gpt2"])
def test_tokenizers_are_the_converter_s(record: dict[str, Any], name: str) -> None:
    """Tokens, types, scores, merges, special ids and chat templates of the four real tokenizers."""
    tokenizer = ZOO[name].tokenizer
    theirs = {k: v[1] for k, v in record[name]["keys"].items() if k.startswith("tokenizer.")}
    bos, eos = ENDS[tokenizer]
    rows = theirs["tokenizer.ggml.tokens"]["length"]
    config = {"vocab_size": rows, "bos_token_id": bos, "eos_token_id": eos}
    read = read_vocab(shared_data() / "tokenizers" / f"{tokenizer}-hf", config)
    keys = vocab.to_keys(read)
    if "tokenizer.ggml.scores" in keys:
        rounded = np.array(keys["tokenizer.ggml.scores"], np.float32).tolist()
        keys["tokenizer.ggml.scores"] = rounded
    ours = {key: gguf_converter.short(value) for key, value in keys.items()}
    assert differing(name, ours, theirs) == set()
    assert read.tokens[-SPARE_ROWS:] == [f"[PAD{i}]" for i in range(rows - SPARE_ROWS, rows)]


@pytest.mark.parametrize("name", ZOO)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """A file in float32 gives back the model: its class, its weights, its logits."""
    source = make_member(name, tmp_path / "model", small=True)
    export_gguf(source, tmp_path / "m.gguf", "F32", progress=False)
    back = gguf_to_hf(tmp_path / "m.gguf", tmp_path / "back", dtype=None, progress=False)
    before, after = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (source, back))
    if name != "mistral":  # which is a Llama
        assert type(before) is type(after)
    values, stored = before.state_dict(), after.state_dict()
    assert values.keys() == stored.keys()
    for key, value in values.items():
        torch.testing.assert_close(stored[key], value, rtol=0, atol=1e-6)
    ids = torch.arange(3, 250, 5)[None]
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=0, atol=1e-4)


def whole_characters(llama_cpp: LlamaCpp, model: Any, length: int) -> tuple[Any, dict[int, float]]:
    """The log-probabilities of the model and of llama.cpp's likeliest 20 tokens after some prompt,
    the first whose likeliest token is no half character, for which the server names none."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 250, (length,), generator=generator).tolist()
        with torch.no_grad():
            ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        if best := llama_cpp.generate(ids, 1, ignore_eos=True):
            assert best == [int(ours.argmax())]
            return ours, llama_cpp.next_logprobs(ids, 20)
    raise AssertionError("no such prompt")


@needs_llama_cpp
@pytest.mark.parametrize("name", ZOO)
def test_exact_weights_give_exact_logits(tmp_path: Path, name: str) -> None:
    """In F32, beyond every window, whatever the architecture."""
    source = make_member(name, tmp_path / "model", small=True)
    export_gguf(source, tmp_path / "m.gguf", "F32", progress=False)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    llama_cpp = LlamaCpp(tmp_path / "m.gguf", 128, threads=1, precise=True)
    ours, theirs = whole_characters(llama_cpp, model, 60)
    worst = max(abs(ours[i].item() - value) for i, value in theirs.items())
    assert worst < (5e-3 if name in GELU else 5e-5)


def greedy(model: Any, tokenizer: Any, steps: int) -> tuple[list[int], list[int]]:
    """A prompt, and its continuation without near-ties and half characters, which the server that
    runs llama.cpp swallows."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(300, 30000, (40,), generator=generator).tolist()
        prompt, gap = list(ids), 9.0
        for _ in range(steps):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            best = logits.topk(2).values
            gap = min(gap, (best[0] - best[1]).item())
            ids.append(int(logits.argmax()))
            if gap < 0.03 or "\ufffd" in tokenizer.decode(ids[-1:]):
                break
        else:
            return prompt, ids[40:]
    raise AssertionError("no such prompt")


@needs_llama_cpp
@pytest.mark.parametrize("name", SLOW)
def test_llama_cpp_computes_the_model(tmp_path: Path, name: str) -> None:
    """In F16: the same greedy tokens as transformers, the likeliest ten within 1e-2."""
    source = make_member(name, tmp_path / "model")
    export_gguf(source, tmp_path / "m.gguf", "F16", progress=False)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    prompt, expected = greedy(model, AutoTokenizer.from_pretrained(source), 12)
    llama_cpp = LlamaCpp(tmp_path / "m.gguf", 128, threads=1, precise=True)
    assert llama_cpp.generate(prompt, 12, ignore_eos=True) == expected
    for count in (0, 5, 11):
        ids = prompt + expected[:count]
        with torch.no_grad():
            ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        theirs = llama_cpp.next_logprobs(ids, 10)
        assert len(theirs) == 10
        assert max(abs(ours[i].item() - value) for i, value in theirs.items()) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_real_converter_writes_the_same(
    tmp_path: Path, record: dict[str, Any], name: str
) -> None:
    """Every key and every byte of every tensor, and the record is what it writes today."""
    source = make_member(name, tmp_path / "model")
    theirs = convert(source, tmp_path / "theirs.gguf")
    export_gguf(source, tmp_path / "ours.gguf", "F16", progress=False)
    found, expected = summary(tmp_path / "ours.gguf"), summary(theirs)
    assert expected == record[name]
    assert differing(name, found["keys"], expected["keys"]) == set()
    assert found["tensors"] == expected["tensors"]
    ours, written = data(tmp_path / "ours.gguf"), data(theirs)
    for tensor in ours:
        if tensor == "rope_freqs.weight":  # computed in float64 here, in float32 there
            np.testing.assert_allclose(ours[tensor], written[tensor], rtol=1e-6)
        else:
            assert np.array_equal(ours[tensor], written[tensor]), tensor


def test_models_saved_without_their_prefix(tmp_path: Path) -> None:
    """As the first GPT-2 was: h.0.attn.c_attn.weight and masks beside."""
    source = make_member("gpt2", tmp_path / "model", small=True)
    bare = tmp_path / "bare" / "model"
    shutil.copytree(source, bare)
    weights = {
        name.removeprefix("transformer."): value
        for name, value in load_file(source / "model.safetensors").items()
    }
    weights["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(weights, bare / "model.safetensors", metadata={"format": "pt"})
    for folder, name in ((source, "a.gguf"), (bare, "b.gguf")):
        export_gguf(folder, tmp_path / name, "F16", progress=False)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_experts_stored_in_three_dimensions(tmp_path: Path) -> None:
    """As newer checkpoints hold them: gate and up in one tensor of all experts."""
    source = make_member("qwen3moe", tmp_path / "model", small=True)
    fused = tmp_path / "fused" / "model"
    shutil.copytree(source, fused)
    weights = load_file(source / "model.safetensors")
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        linears = {
            name: torch.stack([weights.pop(f"{path}.{e}.{name}.weight") for e in range(4)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        weights[f"{path}.gate_up_proj"] = torch.cat([linears["gate_proj"], linears["up_proj"]], 1)
        weights[f"{path}.down_proj"] = linears["down_proj"]
    save_file(weights, fused / "model.safetensors", metadata={"format": "pt"})
    for folder, name in ((source, "a.gguf"), (fused, "b.gguf")):
        export_gguf(folder, tmp_path / name, "F16", progress=False)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def pack_linears(source: Path, out: Path) -> Path:
    """W4A16 in groups of 32, rounded to nearest: every projection, those of experts too."""
    shutil.copytree(source, out)
    tensors, scheme = load_file(source / "model.safetensors"), scheme_from_name("W4A16", 32)
    schemes = {
        name.removesuffix(".weight"): scheme
        for name in tensors
        if "proj.weight" in name or ".experts." in name
    }
    for module in schemes:
        rounded = round_to_nearest(tensors.pop(f"{module}.weight"), scheme)
        tensors |= compress(module, rounded, scheme)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = config_from_schemes(schemes, ["lm_head"], "0")
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_quantized_experts_are_carried_over(tmp_path: Path, name: str) -> None:
    """Codes of every expert, stacked, without a second rounding; import tells them apart again."""
    source = make_member(name, tmp_path / "model", small=True)
    packed = pack_linears(source, tmp_path / "w4")
    report = export_gguf(packed, tmp_path / "m.gguf", "Q4_0", progress=False)
    checkpoint = Checkpoint(packed)
    assert {m for m in checkpoint.schemes if ".experts." in m} <= set(report.repacked)
    back = gguf_to_hf(tmp_path / "m.gguf", tmp_path / "back", dtype=torch.float32, progress=False)
    weights = load_file(back / "model.safetensors")
    for module in report.repacked:
        q = checkpoint.quantized(module)
        expected = q._replace(scale=q.scale.half().float()).dequantize()
        assert torch.equal(weights[f"{module}.weight"], expected), module


def test_sampling_and_size_are_told(tmp_path: Path) -> None:
    """What generation_config.json recommends, in the types that the converter gives it."""
    source = make_member("gpt2", tmp_path / "model", small=True)
    path = source / "generation_config.json"
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "do_sample": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **given}))
    export_gguf(source, tmp_path / "m.gguf", "F16", progress=False)
    keys = summary(tmp_path / "m.gguf")["keys"]
    found = {k.rpartition(".")[2]: v for k, v in keys.items() if k.startswith("general.sampling.")}
    assert found == {
        "temp": ["FLOAT32", pytest.approx(0.6)],
        "top_p": ["FLOAT32", pytest.approx(0.9)],
        "min_p": ["FLOAT32", pytest.approx(0.05)],
        "top_k": ["INT32", 20],
    }
    assert keys["general.size_label"] == ["STRING", "134K"]


def test_sizes_are_shortened_as_the_converter_does() -> None:
    counts = [134_515_008, 7_241_732_096, 1_235_814_400, 999, 12_345, 405_000_000_000]
    assert [short_count(n) for n in counts] == ["135M", "7.2B", "1.2B", "1.0K", "12K", "405B"]


@needs_llama_cpp
@pytest.mark.slow
def test_long_factors_beyond_the_original_context(tmp_path: Path) -> None:
    """In float32, exactly; llama.cpp takes them whenever its own context is longer than that."""
    source = make_member("phi3-longrope", tmp_path / "model")
    export_gguf(source, tmp_path / "m.gguf", "F32", progress=False)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    llama_cpp = LlamaCpp(tmp_path / "m.gguf", 512, threads=1, precise=True)
    ids = torch.randint(300, 30000, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    theirs = llama_cpp.next_logprobs(ids, 10)
    assert max(abs(ours[i].item() - value) for i, value in theirs.items()) < 1e-3
