"""Our GGUF files in the real llama.cpp: its logits and tokens against transformers' on our weights.

llama.cpp rounds the input of every quantized matrix to 8-bit blocks, so the exact comparison gives
transformers the same rounding (evals/llamacpp_inputs.py), and llama.cpp float32 keys and values.
Whatever is then left is the order of additions: a wrong name, row order, rope, epsilon or block
shows at once.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.evals.llamacpp import LlamaCpp, available, generate
from lowbit.evals.scorer import load_scorer
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf.as_folder import folder_of
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.to_hf import gguf_to_hf
from transformers import AutoModelForCausalLM, AutoTokenizer

from .gguf_models import shared_data, tiny_llama
from .runtime_models import hf_greedy, quantize_folder, with_config

pytestmark = pytest.mark.skipif(not available(), reason="llama.cpp (xllamacpp) is not installed")

PROMPTS = ["Once upon a time", "Lily and Tom", "One day, a little girl named"]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def stories() -> Path:
    return shared_data() / "stories260k-ffn192"


def exported(source: Path, folder: Path, file_type: str) -> tuple[Path, Any]:
    """The GGUF file of `source`, and the float32 transformers model of the weights in it."""
    path = folder / "model.gguf"
    export_gguf(source, path, file_type, progress=False)
    back = gguf_to_hf(path, folder / "back", dtype=torch.float32, progress=False)
    return path, AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()


def rounding(path: Path, folder: Path) -> Any:
    """The float32 transformers model of a file's weights, its inputs rounded as llama.cpp's."""
    return load_scorer(folder_of(path, lambda line: None, folder), inputs="llama.cpp").model


def largest_difference(llama_cpp: LlamaCpp, model: Any, ids: list[int]) -> float:
    """Between the log-probabilities of llama.cpp's 20 likeliest next tokens and the model's."""
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    theirs = llama_cpp.next_logprobs(ids, 20)
    assert len(theirs) == 20
    return max(abs(ours[i].item() - value) for i, value in theirs.items())


def story_ids(folder: Path, count: int) -> list[int]:
    text = (shared_data() / "text" / "tinystories_valid.txt").read_text()[:4000]
    return AutoTokenizer.from_pretrained(folder)(text).input_ids[:count]


@pytest.mark.parametrize("rope", ["default", *ROPES])
def test_exact_weights_give_exact_logits(stories: Path, tmp_path: Path, rope: str) -> None:
    """F32, over 200 positions, for each rope type that is exported."""
    source = tmp_path / "source"
    shutil.copytree(stories, source, copy_function=shutil.copyfile)
    source.chmod(0o755)
    if rope != "default":
        with_config(source, rope_parameters={**ROPES[rope], "rope_theta": 10000.0})
    path, model = exported(source, tmp_path, "F32")
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    llama_cpp = LlamaCpp(path, 256, threads=1, precise=True)
    ids = story_ids(stories, 200)
    for count in (1, 17, 200):
        assert largest_difference(llama_cpp, expected, ids[:count]) < 2e-4
        assert largest_difference(llama_cpp, model, ids[:count]) < 2e-4
    if rope != "default":  # the scaling matters at this length, so the agreement says something
        plain = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32).eval()
        assert largest_difference(llama_cpp, plain, ids) > 0.05


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_mean_in_llama_cpp_what_they_mean_here(
    stories: Path, tmp_path: Path, file_type: str
) -> None:
    path, _ = exported(stories, tmp_path, file_type)
    model = rounding(path, tmp_path)
    llama_cpp = LlamaCpp(path, 128, threads=1, precise=True)
    ids = story_ids(stories, 40)
    differences = [largest_difference(llama_cpp, model, ids[:n]) for n in (1, 2, 3, 4, 5)]
    assert max(differences) < 0.3
    if not file_type.endswith("_1"):  # there it also rounds the sums of inputs to float16
        assert min(differences) < 1e-3  # no input fell on the other side of a rounding step


@pytest.mark.parametrize("file_type", ["F16", "BF16"])
def test_half_precision_files(stories: Path, tmp_path: Path, file_type: str) -> None:
    path, model = exported(stories, tmp_path, file_type)
    llama_cpp = LlamaCpp(path, 128, threads=1, precise=True)
    ids = story_ids(stories, 40)
    assert largest_difference(llama_cpp, model, ids) < 0.05
    rounded = rounding(path, tmp_path)
    assert min(largest_difference(llama_cpp, rounded, ids[:n]) for n in (1, 2, 3, 4, 5)) < 1e-4


@pytest.mark.parametrize("prompt", PROMPTS)
def test_same_32_greedy_tokens_in_q8_0(stories: Path, tmp_path: Path, prompt: str) -> None:
    """Against exact arithmetic on the same weights; the prompts are free of near-ties."""
    path, model = exported(stories, tmp_path, "Q8_0")
    ids = AutoTokenizer.from_pretrained(stories)(prompt).input_ids
    ours = hf_greedy(model, ids, 32)
    with torch.no_grad():
        steps = model(torch.tensor([ids + ours])).logits[0, len(ids) - 1 : -1].topk(2).values
    assert (steps[:, 0] - steps[:, 1]).min() > 0.05
    assert generate(path, ids, 32) == ours
    assert len(ours) == 32


def test_repacked_checkpoint_runs(stories: Path, tmp_path: Path) -> None:
    """W4A16 in groups of 32 as Q4_0: llama.cpp computes with the checkpoint's own weights."""
    quantized = quantize_folder(stories, tmp_path / "w4", "W4A16", 32)
    path, _ = exported(quantized, tmp_path, "Q4_0")
    model = rounding(path, tmp_path)
    llama_cpp = LlamaCpp(path, 128, threads=1, precise=True)
    ids = story_ids(stories, 5)
    assert min(largest_difference(llama_cpp, model, ids[:n]) for n in range(1, 6)) < 1e-3


def test_sentencepiece_texts_get_the_same_ids(stories: Path, tmp_path: Path) -> None:
    path, _ = exported(stories, tmp_path, "F16")
    llama_cpp, tokenizer = LlamaCpp(path), AutoTokenizer.from_pretrained(stories)
    text = (shared_data() / "text" / "tinystories_valid.txt").read_text()[:5000]
    for piece in [text, "  two  spaces", "caf\u00e9 \U0001f680", "a\n\nb", "x</s>"]:
        assert llama_cpp.tokenize(piece) == tokenizer(piece).input_ids, piece
    assert llama_cpp.tokenize("a", add_special=False) == tokenizer("a").input_ids[1:]


@pytest.mark.parametrize("add_bos", [False, True])
def test_byte_level_texts_get_the_same_ids(tmp_path: Path, add_bos: bool) -> None:
    source = tiny_llama(tmp_path / "source")
    settings = source / "tokenizer_config.json"
    content = {**json.loads(settings.read_text()), "add_bos_token": add_bos}
    settings.write_text(json.dumps(content))
    path, _ = exported(source, tmp_path, "F16")
    llama_cpp, tokenizer = LlamaCpp(path), AutoTokenizer.from_pretrained(tmp_path / "back")
    first = [tokenizer.bos_token_id] if add_bos else []
    for piece in ["the thing in 33 333", " a  b\n\n2", "<think>the</s>in", "caf\u00e9 \U0001f680"]:
        ids = llama_cpp.tokenize(piece)
        assert ids == tokenizer(piece).input_ids, piece
        assert (
            ids
            == first
            + AutoTokenizer.from_pretrained(source)(piece, add_special_tokens=False).input_ids
        )
    assert len(llama_cpp.generate([1, 2, 3], 8, ignore_eos=True)) == 8


def test_grouped_heads_of_another_size(tmp_path: Path) -> None:
    """head_dim that is not hidden / heads, biases, untied output, on a random model."""
    source = tiny_llama(tmp_path / "source", head_dim=32, attention_bias=True, mlp_bias=True)
    path, model = exported(source, tmp_path, "F32")
    llama_cpp = LlamaCpp(path, 128, threads=1, precise=True)
    assert largest_difference(llama_cpp, model, list(range(5, 60, 3))) < 2e-3


def test_damaged_files_and_prompts_are_user_errors(stories: Path, tmp_path: Path) -> None:
    path, _ = exported(stories, tmp_path, "F16")
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:100000])
    with pytest.raises(UserError, match="cannot load"):
        LlamaCpp(tmp_path / "cut.gguf")
    with pytest.raises(UserError, match="no such GGUF file"):
        generate(tmp_path / "absent.gguf", [1], 4)
    with pytest.raises(UserError, match="refused the prompt"):
        generate(path, [1, 100000], 4)
