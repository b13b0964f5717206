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
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from .gguf_models import merging_tokenizer, shared_data

SPARE_ROWS = 3  # of the embedding, beyond the tokenizer's tokens
ENDS = {  # begin and end of a text, by tokenizer
    "llama-bpe": (128000, 128001),
    "llama-spm": (1, 2),
    "gpt-2": (50256, 50256),
    "qwen2": (151643, 151643),
    "small-bpe": (262, 263),
    "small-spm": (1, 2),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
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
    "pad_token_id": None,
}
_TIED = {**_SIZES, "tie_word_embeddings": True}
_EXPERTS = {**_SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {**_TIED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
_GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256,
    "initializer_range": 0.15, "pad_token_id": None,
}  # fmt: skip


class Member(NamedTuple):
    """kind, settings: of the config. tokenizer: a folder of the shared data's tokenizers."""

    kind: Callable[..., Any]
    settings: dict[str, Any]
    tokenizer: str

    def config(self, vocab_size: int, tokenizer: str | None = None) -> Any:
        bos, eos = ENDS[tokenizer or self.tokenizer]
        ends = {"bos_token_id": bos, "eos_token_id": eos}
        return self.kind(vocab_size=vocab_size, **ends, **self.settings)


ZOO = {
    "llama": Member(LlamaConfig, {**_SIZES, "rope_parameters": LLAMA3_ROPE}, "llama-bpe"),
    "llama-spm": Member(LlamaConfig, {**_TIED, "attention_bias": True, "mlp_bias": True},
                        "llama-spm"),
    "mistral": Member(MistralConfig, {**_SIZES, "head_dim": 32, "sliding_window": None},
                      "llama-spm"),
    "mixtral": Member(MixtralConfig, {**_SIZES, "num_local_experts": 4}, "llama-spm"),
    "qwen2": Member(Qwen2Config, {**_SIZES, "rope_parameters": YARN_ROPE}, "qwen2"),
    "qwen3": Member(Qwen3Config, {**_TIED, "head_dim": 32}, "qwen2"),
    "qwen2moe": Member(Qwen2MoeConfig, {**_EXPERTS, "shared_expert_intermediate_size": 48},
                       "qwen2"),
    "qwen3moe": Member(Qwen3MoeConfig, {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
                       "qwen2"),
    "gemma2": Member(Gemma2Config, _GEMMA, "llama-spm"),
    "gemma3": Member(Gemma3TextConfig, {**_GEMMA, "num_hidden_layers": 7}, "llama-spm"),
    "phi3": Member(Phi3Config, {**_SIZES, "sliding_window": None}, "llama-spm"),
    "phi3-longrope": Member(
        Phi3Config,
        {**_SIZES, "max_position_embeddings": 512, "original_max_position_embeddings": 256,
         "sliding_window": None, "rope_parameters": LONGROPE},
        "llama-spm",
    ),
    "olmo2": Member(Olmo2Config, _SIZES, "gpt-2"),
    "granite": Member(
        GraniteConfig,
        {**_SIZES, "embedding_multiplier": 6.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.2},
        "gpt-2",
    ),
    "starcoder2": Member(Starcoder2Config, {**_TIED, "sliding_window": None}, "gpt-2"),
    "gpt2": Member(GPT2Config, _GPT2, "gpt-2"),
}  # fmt: skip


def make_member(name: str, folder: Path, small: bool = False) -> Path:
    """The model `name` in `folder`, the same bytes every time; with `small`, a tokenizer of a few
    hundred tokens of the same kind."""
    member = ZOO[name]
    tokenizer = member.tokenizer
    if small:
        tokenizer = "small-spm" if tokenizer == "llama-spm" else "small-bpe"
    folder.mkdir(parents=True, exist_ok=True)
    rows = _save_tokenizer(tokenizer, folder) + SPARE_ROWS
    torch.manual_seed(0)
    config = member.config(rows, tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which are else all one or zero
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def _save_tokenizer(tokenizer: str, folder: Path) -> int:
    """The tokenizer's files in `folder`; how many tokens it has."""
    if tokenizer == "small-bpe":
        PreTrainedTokenizerFast(
            tokenizer_object=merging_tokenizer(), bos_token="<s>", eos_token="</s>"
        ).save_pretrained(folder)
        return merging_tokenizer().get_vocab_size()
    source = shared_data() / "tokenizers" / f"{tokenizer}-hf"
    if tokenizer == "small-spm":
        source = shared_data() / "stories260k"
    for path in source.glob("token*"):
        shutil.copyfile(path, folder / path.name)
    return Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size()
