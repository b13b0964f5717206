"""A tiny random Llama with a byte tokenizer, as a Hugging Face folder: tiny_model.py FOLDER."""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def main(folder: str) -> None:
    """Save model and tokenizer in `folder`."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
