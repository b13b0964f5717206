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
    """`split`: the pattern cut by, None for GPT-2's; `digits`: each digit alone, before that.

    `ignore_merges`: a piece that is in the vocabulary is taken whole.
    """

    split: str | None = None
    digits: bool = False
    ignore_merges: bool = False


LLAMA3 = CONTRACTIONS + WORDS + r"|\p{N}{1,3}" + SIGNS + TAIL
QWEN2 = CONTRACTIONS + WORDS + r"|\p{N}" + SIGNS + TAIL
TEKKEN = f"{CAPITALISED}|{CAPITALS}" + r"|\p{N}" + SIGNS_SLASH + TAIL
GPT4O = (
    f"{CAPITALISED}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?" + r"|\p{N}{1,3}" + SIGNS_SLASH + TAIL
)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer(LLAMA3, ignore_merges=True),
    "smaug-bpe": PreTokenizer(LLAMA3),
    "qwen2": PreTokenizer(QWEN2),
    "deepseek-r1-qwen": PreTokenizer(QWEN2),
    "tekken": PreTokenizer(TEKKEN, ignore_merges=True),
    "gpt-4o": PreTokenizer(GPT4O),
    "llama4": PreTokenizer(GPT4O),
}

# First 8 hex digits of sha256(str(ids of CHECK_TEXT)), as llama.cpp's converter lists them.
HASHES = {
    "0ef9807a": "llama-bpe",
    "3ce83efd": "gpt-2",
    "85505942": "smollm",
    "e636dc30": "qwen2",
    "d4540891": "qwen2",
    "b3f499bb": "deepseek-r1-qwen",
    "63b97e42": "tekken",
    "d353350c": "llama4",
}

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
    own_pattern, before = parts[-1].get("use_regex", True), parts[:-1]
    ignore_merges = bool(tokenizer_json["model"].get("ignore_merges"))
    if own_pattern and not before:
        return PreTokenizer(ignore_merges=ignore_merges)
    if len(before) != 1:
        return None
    if own_pattern and before[0].get("type") == "Digits" and before[0].get("individual_digits"):
        return PreTokenizer(digits=True, ignore_merges=ignore_merges)
    pattern = before[0].get("pattern", {}).get("Regex")
    isolated = before[0].get("behavior") == "Isolated" and not before[0].get("invert")
    if own_pattern or pattern is None or not isolated:
        return None
    return PreTokenizer(pattern, ignore_merges=ignore_merges)


def build(name: str) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """The `tokenizers` object for llama.cpp's name, and whether merges are ignored.

    Raises UserError for a name that is not in the table.
    """
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"tokenizer.ggml.pre '{name}' is not one that lowbit can rebuild; known: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    split, digits, ignore_merges = PRE_TOKENIZERS[name]
    parts: list[pre_tokenizers.PreTokenizer] = []
    if digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        parts.append(pre_tokenizers.Split(Regex(split), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    return (parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)), ignore_merges
