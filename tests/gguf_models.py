"""Tokenizers and reference encoders that the GGUF tests share."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from lowbit.quantize.gguf.architectures import LLAMA
from lowbit.quantize.gguf.blocks import Codec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from .runtime_models import save_tiny

MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("i", "n"), ("\u0120", "a"), ("3", "3")]
VOCAB = 288


def shared_data() -> Path:
    """The folder of trained models and vocabularies; skips the test where it is not given."""
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained tokenizers and models to test with")
    return Path(folder)


def llama_name(module: str) -> str:
    """GGUF's name for a Llama's module."""
    if module in LLAMA.outer:
        return LLAMA.outer[module].name
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LLAMA.layer[inner].name}"


def merging_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges, three special tokens and one plain added token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [a + b for a, b in MERGES]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def tiny_llama(folder: Path, tokenizer: Tokenizer | None = None, **changes: object) -> Path:
    """A random two-layer Llama, hidden size 64, two key-value heads of four, with a tokenizer."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**{**settings, **changes})
    save_tiny(folder, config, tokenizer=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer or merging_tokenizer(),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(folder)
    return folder


def llama_cpp_blocks(x: Tensor, codec: type[Codec], importance: Tensor | None = None) -> Tensor:
    """float32 [rows, columns] to llama.cpp's own bytes [rows, bytes], from its shared library;
    importance: float32 [columns]."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp (xllamacpp) is not installed")
    import gguf

    path = next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    quantize = ctypes.CDLL(str(path)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    x = x.contiguous()
    weights = None if importance is None else importance.contiguous()
    out = torch.zeros(x.shape[0], codec.row_bytes(x.shape[1]), dtype=torch.uint8)
    kind = int(gguf.GGMLQuantizationType[codec.name])
    weight_pointer = None if weights is None else weights.data_ptr()
    written = quantize(kind, x.data_ptr(), out.data_ptr(), 0, *x.shape, weight_pointer)
    assert written == out.numel()
    return out
