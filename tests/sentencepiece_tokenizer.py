"""A tokenizer of SentencePiece's kind, as Llama 2 has it: a space is written before a word's first
token, one is put before the text and one taken off it again, and letters without a token are bytes.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_PIECES = (SPACE, "a", "b", SPACE + "a", SPACE + "b", "ab", SPACE + "ab")
_MERGES = [(SPACE, "a"), ("a", "b"), (SPACE, "b"), (SPACE + "a", "b")]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """<unk>, <s>, </s>, the 256 bytes, and seven pieces of words of a and b."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    bpe = models.BPE(
        {token: i for i, token in enumerate(tokens)}, _MERGES, byte_fallback=True, fuse_unk=True,
        unk_token="<unk>",
    )  # fmt: skip
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
