"""Tokenizers of exported files as llama.cpp reads them, on its own texts and expected ids."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from lowbit.evals.llamacpp import LlamaCpp, available
from lowbit.quantize.gguf import vocab
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.hf_tokenizer import write_tokenizer
from lowbit.quantize.gguf.reader import GGUFFile
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .gguf_models import shared_data

pytestmark = pytest.mark.skipif(not available(), reason="llama.cpp (xllamacpp) is not installed")
FOLDERS = ("gpt-2", "llama-spm", "qwen2", "llama-bpe")
REBUILT = ("phi-3", "starcoder", "deepseek-coder")  # of which there is only a vocabulary in GGUF
QUICK = ("gpt-2", "llama-spm", "deepseek-coder")
NAMES = [
    pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*FOLDERS, *REBUILT)
]


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Texts and their ids, as llama.cpp's repository has them for its own tests."""
    path = shared_data() / "tokenizers" / "gguf-vocab" / f"ggml-vocab-{name}.gguf"
    texts = path.with_name(path.name + ".inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    ids = ([int(i) for i in line.split()] for line in lines)
    return list(zip(texts, ids, strict=True))


def model_with(name: str, folder: Path) -> Path:
    """A tiny Llama with the tokenizer `name`."""
    folder.mkdir()
    if name in FOLDERS:
        for path in (shared_data() / "tokenizers" / f"{name}-hf").iterdir():
            shutil.copyfile(path, folder / path.name)
    else:
        stored = shared_data() / "tokenizers" / "gguf-vocab" / f"ggml-vocab-{name}.gguf"
        write_tokenizer(vocab.from_keys(GGUFFile(stored).keys), folder, 128)
    rows = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() + 5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=rows, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_cuts_text_as_expected(tmp_path: Path, name: str) -> None:
    source = model_with(name, tmp_path / "model")
    export_gguf(source, tmp_path / "m.gguf", "F16", progress=False)
    llama_cpp = LlamaCpp(tmp_path / "m.gguf", 64, threads=1)
    texts = vectors(name)
    assert len(texts) > 40
    for text, ids in texts:
        assert llama_cpp.tokenize(text, add_special=False) == ids, text
    tokenizer = AutoTokenizer.from_pretrained(source)
    for text in ("Hello world", "  \n\n two", "caf\u00e9 \U0001f680 3333"):
        assert llama_cpp.tokenize(text) == tokenizer(text).input_ids, text
