"""A tokenizer as GGUF stores it: the neutral form between Hugging Face's files and the metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ...kernels.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # what sentencepiece writes for a space
BOS_BY_DEFAULT = ("llama-bpe", "tekken")  # where a file without the key means yes
SHORT_ROLES = {  # the format's word for a special token (one misspelt), and Hugging Face's
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "padding": "pad",
    "seperator": "sep",
    "cls": "cls",
    "mask": "mask",
}
ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask")


@dataclass(frozen=True)
class Vocab:
    """`model`: "gpt2" (byte-level BPE, with `merges`) or "llama" (sentencepiece, with `scores`).

    `tokens` and `types` have one entry a row of the embedding. `special`: role -> token id.
    `chat_templates`: name -> Jinja text, the usual one under "default".
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    special: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    chat_templates: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model == "gpt2" and not self.merges:
            raise UserError("the tokenizer has no merges: llama.cpp loads no byte-level BPE so")
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if ids.setdefault(token, i) != i:
                raise UserError(
                    f"tokens {ids[token]} and {i} of the vocabulary are both {token!r}: "
                    "llama.cpp cannot tell them apart"
                )
        wrong = {r: i for r, i in self.special.items() if not 0 <= i < len(self.tokens)}
        if wrong:
            raise UserError(f"special tokens {wrong} lie outside the {len(self.tokens)} tokens")

    def token(self, role: str) -> str | None:
        """The text of the special token `role`."""
        return self.tokens[self.special[role]] if role in self.special else None

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a generation, eos first."""
        ids = [self.special[role] for role in ("eos", "eot", "eom") if role in self.special]
        return list(dict.fromkeys(ids))


def is_padding(token: str, kind: int) -> bool:
    """Whether the token only fills a row of the embedding."""
    return kind == UNUSED and re.fullmatch(r"\[PAD\d+\]", token) is not None


def to_keys(vocab: Vocab) -> dict[str, Any]:
    """The tokenizer.* keys of a file."""
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": vocab.model,
        "tokenizer.ggml.pre": vocab.pre,
        "tokenizer.ggml.tokens": vocab.tokens,
    }
    if vocab.scores is not None:
        keys["tokenizer.ggml.scores"] = vocab.scores
    keys["tokenizer.ggml.token_type"] = vocab.types
    if vocab.merges is not None:
        keys["tokenizer.ggml.merges"] = vocab.merges
    for role in ROLES:
        if role in vocab.special:
            keys[f"tokenizer.ggml.{role}_token_id"] = vocab.special[role]
    keys["tokenizer.ggml.add_bos_token"] = vocab.add_bos
    keys["tokenizer.ggml.add_eos_token"] = vocab.add_eos
    keys["tokenizer.ggml.add_space_prefix"] = vocab.add_space_prefix
    named = sorted(set(vocab.chat_templates) - {"default"})
    if named:
        keys["tokenizer.chat_templates"] = named
    for name in named:
        keys[f"tokenizer.chat_template.{name}"] = vocab.chat_templates[name]
    if "default" in vocab.chat_templates:
        keys["tokenizer.chat_template"] = vocab.chat_templates["default"]
    return keys


def from_keys(keys: dict[str, Any]) -> Vocab:
    """The vocabulary of a file's metadata; UserError for a kind that cannot be rebuilt."""
    model = keys.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UserError(f"tokenizer '{model}' cannot be imported; known: gpt2, llama")
    tokens = _list(keys, "tokens", str) or []
    types = _list(keys, "token_type", int) or [NORMAL] * len(tokens)
    scores, merges = _list(keys, "scores", float), _list(keys, "merges", str)
    needed, name = (merges, "merges") if model == "gpt2" else (scores, "scores")
    if not tokens or len(types) != len(tokens) or not needed:
        raise UserError(f"the file's tokenizer is incomplete: it needs tokens and {name}")
    sentencepiece = model == "llama"
    pre = _one(keys, "tokenizer.ggml.pre", str, "default")
    special = {r: _one(keys, f"tokenizer.ggml.{r}_token_id", int, None) for r in ROLES}
    by_default = sentencepiece or pre in BOS_BY_DEFAULT
    return Vocab(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        special={r: i for r, i in special.items() if i is not None},
        add_bos=_one(keys, "tokenizer.ggml.add_bos_token", bool, by_default),
        add_eos=_one(keys, "tokenizer.ggml.add_eos_token", bool, False),
        add_space_prefix=_one(keys, "tokenizer.ggml.add_space_prefix", bool, sentencepiece),
        chat_templates=_templates(keys),
    )


def _templates(keys: dict[str, Any]) -> dict[str, str]:
    names = keys.get("tokenizer.chat_templates", [])
    if not isinstance(names, list) or not all(type(n) is str for n in names):
        raise UserError("the file's tokenizer.chat_templates are no list of names")
    named = {n: _one(keys, f"tokenizer.chat_template.{n}", str, None) for n in names}
    named["default"] = _one(keys, "tokenizer.chat_template", str, named.get("default"))
    return {name: text for name, text in named.items() if text is not None}


def _list(keys: dict[str, Any], part: str, kind: type) -> list[Any] | None:
    """The list of one kind under tokenizer.ggml.PART, None where there is none."""
    value = keys.get(f"tokenizer.ggml.{part}")
    if value is not None and not (isinstance(value, list) and all(type(v) is kind for v in value)):
        raise UserError(f"the file's tokenizer.ggml.{part} is no list of {kind.__name__}")
    return value


def _one(keys: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = keys.get(key, default)
    if value is not default and type(value) is not kind:
        raise UserError(f"the file's {key} is {str(value)[:40]!r}, no {kind.__name__}")
    return value
