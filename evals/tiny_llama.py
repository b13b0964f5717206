"""A random Llama of a few thousand weights with a tokenizer of bytes, for tests of files."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = 257  # the id of </s>, behind 256 bytes and a merge
SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "


def tiny_llama(folder: Path, layers: int = 2, max_shard_size: str = "50KB") -> Path:
    """Save it in `folder`, in several shards. llama.cpp reads no BPE without a merge: there is one.

    Its pre-tokenizer is GPT-2's.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size=max_shard_size)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "th", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
