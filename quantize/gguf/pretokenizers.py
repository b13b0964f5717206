"""How byte-level BPE cuts text before it merges: llama.cpp's names and the `tokenizers` parts.

A GGUF holds no pattern, only a name (`tokenizer.ggml.pre`) for one that llama.cpp has built in. A
tokenizer gets its name as llama.cpp's own converter gives it: by the hash of the token ids of one
fixed text. A vocabulary that the list of hashes does not know gets the name whose parts are the
same as in its tokenizer.json. Where neither finds one, a wrong guess would silently split text in
another way than the model was trained on, so that is an error, with `--pre` to overrule it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, pre_tokenizers

from ...kernels.errors import UserError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
CAPITALISED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"


class PreTokenizer(NamedTuple):
    """`splits`: patterns to cut by, one after the other; `gpt2`: then by GPT-2's own.

    `ignore_merges`: a piece that is in the vocabulary is taken whole.
    """

    splits: tuple[str, ...] = ()
    gpt2: bool = True
    ignore_merges: bool = False


def _own(*splits: str, ignore_merges: bool = False) -> PreTokenizer:
    """Cut by `splits` alone."""
    return PreTokenizer(splits, False, ignore_merges)


DIGIT = r"\p{N}"
LLAMA3 = CONTRACTIONS + WORDS + r"|\p{N}{1,3}" + SIGNS + TAIL
QWEN2 = CONTRACTIONS + WORDS + r"|\p{N}" + SIGNS + TAIL
TEKKEN = f"{CAPITALISED}|{CAPITALS}" + r"|\p{N}" + SIGNS_SLASH + TAIL
GPT4O = (
    f"{CAPITALISED}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?" + r"|\p{N}{1,3}" + SIGNS_SLASH + TAIL
)

DEEPSEEK_CODER = (
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", DIGIT,
)  # fmt: skip

# The first of several with the same meaning is what an unknown tokenizer of these parts is called.
PRE_TOKENIZERS = {
    **dict.fromkeys(
        ("gpt-2", "olmo", "mpt", "phi-2", "gigachat", "granite-docling"), PreTokenizer()
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((DIGIT,)),
    ),
    **dict.fromkeys(
        ("llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _own(LLAMA3, ignore_merges=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _own(LLAMA3)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "hunyuan"), _own(QWEN2)
    ),
    "tekken": _own(TEKKEN, ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _own(GPT4O)),
    "deepseek-coder": _own(*DEEPSEEK_CODER),
}

# First 8 hex digits of sha256(str(ids of CHECK_TEXT)), as llama.cpp's converter lists them.
HASHES = {
    digest: name
    for name, digests in {
        "gpt-2": "3ce83efd 0fe1cf6e", "olmo": "b6dc8df9", "phi-2": "fcace8b9",
        "gigachat": "ad851be1", "granite-docling": "53e32597", "smollm": "85505942",
        "starcoder": "35d91631", "refact": "6221ad28", "command-r": "9c2227e4",
        "codeshell": "7b3e7548", "exaone": "4e2b24cc", "minerva-7b": "1431a23e",
        "llama-bpe": "0ef9807a", "falcon3": "9d032fcb",
        "falcon-h1": "a6b57017 60476e12 3eda48b4 48f8e02c", "pixtral": "0e9433cb",
        "midm-2.0": "f6791d19", "lfm2": "9e454714 169bf029", "smaug-bpe": "c136ed14",
        "dbrx": "a8594e3e", "glm4": "a1336059 9ca2dd61 cdf5f353",
        "chatglm-bpe": "b6e8e151 81d72c73", "qwen2": "e636dc30 d4540891",
        "deepseek-r1-qwen": "b3f499bb", "stablelm2": "32d85c31", "megrez": "d4c8f286",
        "kormo": "4a2e2aba", "hunyuan": "7e57df22", "tekken": "63b97e42",
        "gpt-4o": "ccc2ef01", "llama4": "d353350c", "kanana2": "e4d54df1",
        "deepseek-coder": "347715f5",
    }.items()
    for digest in digests.split()
}  # fmt: skip

# The text whose ids are hashed; every character counts.
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n"
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 "
    "\U0001f999\U0001f999 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601"
    " ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======= "
    "\u043d\u0435\u0449\u043e \u043d\u0430 "
    "\u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 "
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)


def identify(tokenizer: Tokenizer) -> str:
    """llama.cpp's name for the pre-tokenizer of a byte-level BPE `tokenizer`.

    Raises UserError when neither the hash nor the parts are known.
    """
    digest = hashlib.sha256(str(tokenizer.encode(CHECK_TEXT).ids).encode()).hexdigest()
    if digest[:8] in HASHES:
        return HASHES[digest[:8]]
    parts = json.loads(tokenizer.to_str())
    described = describe(parts)
    for name, known in PRE_TOKENIZERS.items():
        if known == described:
            return name
    raise UserError(
        f"the tokenizer's pre-tokenizer is none that lowbit knows by llama.cpp's name (hash "
        f"{digest[:8]}, parts {json.dumps(parts['pre_tokenizer'])[:300]}); name it with --pre, "
        f"for example one of {', '.join(PRE_TOKENIZERS)}"
    )


def describe(tokenizer_json: dict[str, Any]) -> PreTokenizer | None:
    """The pre-tokenizer that tokenizer.json spells out, None for one of another shape."""
    if (tokenizer_json["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    outer = tokenizer_json["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", [outer])
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    gpt2 = parts[-1].get("use_regex", True)
    splits = tuple(_pattern(part) for part in parts[:-1])
    known = tuple(split for split in splits if split is not None)
    if len(known) < len(splits) or not (gpt2 or known):
        return None
    return PreTokenizer(known, gpt2, bool(tokenizer_json["model"].get("ignore_merges")))


def _pattern(part: dict[str, Any]) -> str | None:
    """What a part of a pre-tokenizer isolates, None where it does something else."""
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return DIGIT
    isolated = part.get("behavior") == "Isolated" and not part.get("invert")
    if part.get("type") != "Split" or not isolated:
        return None
    pattern = part.get("pattern", {}).get("Regex")
    return DIGIT if pattern == r"\d" else pattern


def build(name: str) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """The `tokenizers` object for llama.cpp's name, and whether merges are ignored.

    Raises UserError for a name that is not in the table.
    """
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"tokenizer.ggml.pre '{name}' is not one that lowbit can rebuild; known: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    splits, gpt2, ignore_merges = PRE_TOKENIZERS[name]
    parts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Digits(individual_digits=True)
        if split == DIGIT
        else pre_tokenizers.Split(Regex(split), "isolated")
        for split in splits
    ]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2))
    return (parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)), ignore_merges
