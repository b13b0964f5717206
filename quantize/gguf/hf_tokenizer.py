"""GGUF's tokenizer metadata rebuilt as Hugging Face's files.

Byte-level BPE is spelt out but for its pre-tokenizer, which the name gives. Sentencepiece becomes
BPE with byte fallback: each way to cut a token into two others is a merge, ranked by the token's
score. Control tokens are special, so that decoding can leave them out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from ...kernels.errors import UserError
from . import pretokenizers
from . import vocab as v
from .vocab import Vocab

SPECIAL = (v.CONTROL, v.UNKNOWN)


def write_tokenizer(vocab: Vocab, folder: Path, context: int) -> None:
    """tokenizer.json, tokenizer_config.json, chat templates and generation_config.json."""
    build_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocab.add_bos,
        "add_eos_token": vocab.add_eos,
    }
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for role, short in named.items():
        if (token := vocab.token(role)) is not None:
            settings[f"{short}_token"] = token
    write_json(folder / "tokenizer_config.json", settings)
    for name, template in vocab.chat_templates.items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{Path(name).name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")
    write_json(folder / "generation_config.json", token_ids(vocab))


def token_ids(vocab: Vocab) -> dict[str, Any]:
    """bos, eos and pad ids as config.json and generation_config.json have them."""
    ends = vocab.end_ids
    ids = {
        "bos_token_id": vocab.special.get("bos"),
        "eos_token_id": ends if len(ends) > 1 else (ends or [None])[0],
        "pad_token_id": vocab.special.get("padding"),
    }
    return {name: i for name, i in ids.items() if i is not None}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_tokenizer(vocab: Vocab) -> Tokenizer:
    """The `tokenizers` object; UserError for a pre-tokenizer name that is not known."""
    tokenizer = _sentencepiece(vocab) if vocab.model == "llama" else _byte_level(vocab)
    kinds = list(zip(vocab.tokens, vocab.types, strict=True))
    special = [AddedToken(t, normalized=False, special=True) for t, k in kinds if k in SPECIAL]
    plain = [AddedToken(t, normalized=False) for t, k in kinds if k == v.USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    if (template := _template(vocab)) is not None:
        tokenizer.post_processor = template
    return tokenizer


def _ids(vocab: Vocab) -> dict[str, int]:
    """Token -> id, without those that only fill rows of the embedding."""
    kinds = enumerate(zip(vocab.tokens, vocab.types, strict=True))
    return {token: i for i, (token, kind) in kinds if not v.is_padding(token, kind)}


def _byte_level(vocab: Vocab) -> Tokenizer:
    cut, ignore_merges = pretokenizers.build(vocab.pre)
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in vocab.merges or [])]
    try:
        model = models.BPE(_ids(vocab), merges, ignore_merges=ignore_merges)
    except Exception as e:  # tokenizers raises nothing more precise
        raise UserError(f"the file's merges are not of its tokens ({e})") from e
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocab: Vocab) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            _ids(vocab),
            merges_from_scores(vocab),
            unk_token=vocab.token("unknown"),
            fuse_unk=True,
            byte_fallback=v.BYTE in vocab.types,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", v.SPACE)]
    back: list[Any] = [decoders.Replace(v.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.add_space_prefix:
        steps.insert(0, normalizers.Prepend(v.SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def merges_from_scores(vocab: Vocab) -> list[tuple[str, str]]:
    """Every cut of a normal token into two normal tokens, best score first, then lowest id."""
    assert vocab.scores is not None
    normal = {t: i for i, t in enumerate(vocab.tokens) if vocab.types[i] == v.NORMAL}
    merges = [
        (-vocab.scores[i], i, token[:cut], token[cut:])
        for token, i in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(a, b) for _, _, a, b in sorted(merges)]


def _template(vocab: Vocab) -> processors.TemplateProcessing | None:
    """The post-processor that adds bos and eos, None when neither is added."""
    bos = vocab.token("bos") if vocab.add_bos else None
    eos = vocab.token("eos") if vocab.add_eos else None
    if bos is None and eos is None:
        return None

    def around(sequence: str, type_id: int) -> list[str]:
        parts = [bos, sequence, eos]
        return [f"{part}:{type_id}" for part in parts if part is not None]

    return processors.TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=[(t, vocab.tokens.index(t)) for t in (bos, eos) if t is not None],
    )
