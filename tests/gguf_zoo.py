"""Tiny random models of every architecture that GGUF export knows, each with a real tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from .gguf_models import shared_data

SPARE_ROWS = 3  # of the embedding, beyond the tokenizer's tokens
SPM = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
LLAMA3_ENDS = {"bos_token_id": 128000, "eos_token_id": 128001}
GPT2_ENDS = {"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_EXPERTS = {**_SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256,
    "initializer_range": 0.15,
}  # fmt: skip


class Member(NamedTuple):
    """config: of its vocabulary size. tokenizer: a folder of the shared data's tokenizers."""

    config: Callable[..., Any]
    tokenizer: str


def _made(kind: Callable[..., Any], **settings: Any) -> Callable[[int], Any]:
    return lambda vocab_size: kind(vocab_size=vocab_size, **settings)


ZOO: dict[str, Member] = {
    "llama": Member(
        _made(LlamaConfig, **_SIZES, rope_parameters=LLAMA3_ROPE, **LLAMA3_ENDS), "llama-bpe"
    ),
    "llama-spm": Member(
        _made(LlamaConfig, **{**_SIZES, "tie_word_embeddings": True}, **SPM), "llama-spm"
    ),
    "mistral": Member(_made(MistralConfig, **_SIZES, head_dim=32, sliding_window=None, **SPM),
                      "llama-spm"),
    "mixtral": Member(_made(MixtralConfig, **_SIZES, num_local_experts=4, **SPM), "llama-spm"),
    "qwen2": Member(_made(Qwen2Config, **_SIZES), "qwen2"),
    "qwen3": Member(_made(Qwen3Config, **{**_SIZES, "tie_word_embeddings": True}, head_dim=32),
                    "qwen2"),
    "qwen2moe": Member(
        _made(Qwen2MoeConfig, **_EXPERTS, shared_expert_intermediate_size=48), "qwen2"
    ),
    "qwen3moe": Member(
        _made(Qwen3MoeConfig, **_EXPERTS, head_dim=32, norm_topk_prob=True), "qwen2"
    ),
    "gemma2": Member(
        _made(Gemma2Config, **{**_SIZES, "tie_word_embeddings": True}, head_dim=32,
              query_pre_attn_scalar=32, sliding_window=8, **SPM), "llama-spm"
    ),
    "gemma3": Member(
        _made(Gemma3TextConfig, **{**_SIZES, "tie_word_embeddings": True, "num_hidden_layers": 7},
              head_dim=32, query_pre_attn_scalar=32, sliding_window=8, **SPM), "llama-spm"
    ),
    "phi3": Member(
        _made(Phi3Config, **_SIZES, sliding_window=None, **SPM), "llama-spm"
    ),
    "phi3-longrope": Member(
        _made(Phi3Config, **{**_SIZES, "max_position_embeddings": 512},
              original_max_position_embeddings=256, sliding_window=None,
              rope_parameters=LONGROPE, **SPM), "llama-spm"
    ),
    "olmo2": Member(_made(Olmo2Config, **_SIZES, **GPT2_ENDS), "gpt-2"),
    "granite": Member(
        _made(GraniteConfig, **_SIZES, embedding_multiplier=6.0, logits_scaling=2.0,
              residual_multiplier=0.5, attention_multiplier=0.2, **GPT2_ENDS), "gpt-2"
    ),
    "starcoder2": Member(
        _made(Starcoder2Config, **{**_SIZES, "tie_word_embeddings": True}, sliding_window=None),
        "gpt-2",
    ),
    "gpt2": Member(_made(GPT2Config, **_GPT2), "gpt-2"),
}  # fmt: skip


def make_member(name: str, folder: Path) -> Path:
    """The model `name` in `folder`, the same bytes every time."""
    member = ZOO[name]
    tokenizer = shared_data() / "tokenizers" / f"{member.tokenizer}-hf"
    rows = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size() + SPARE_ROWS
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(member.config(rows), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which are else all one or zero
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    for path in tokenizer.iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder
