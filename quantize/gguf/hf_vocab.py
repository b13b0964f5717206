"""A Hugging Face model folder's tokenizer, read into GGUF's form.

tokenizer.json decides which kind it is: byte-level BPE ("gpt2") or BPE with byte fallback, which is
sentencepiece ("llama"). The scores of the latter come from tokenizer.model where there is one; a
tokenizer.json alone holds the same order as merges, the earliest merge that makes a token being its
rank.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ...calib.safe_files import TOKENIZER, check_json_size, read_json_object, read_text
from ...kernels.errors import UserError
from . import vocab as v
from .pretokenizers import identify
from .spm_model import SpmModel, read_spm_model
from .vocab import Vocab

UNREACHABLE = -1e9  # score of a token that no merge makes
ADDED, PADDING = -1000.0, -10000.0  # scores of added tokens and of rows without one
SPECIAL_LOOKS = re.compile(
    r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL
)


def read_vocab(folder: Path, config: dict[str, Any], pre: str | None = None) -> Vocab:
    """The tokenizer of `folder`, padded to config's vocab_size; `pre` overrules the name found.

    UserError when there is none, when its files are damaged, or when it is of a kind that
    llama.cpp's `gpt2` and `llama` do not cover.
    """
    try:
        return _read_vocab(folder, config, pre)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        raise UserError(
            f"the tokenizer's files in {folder} are not those of a Hugging Face tokenizer "
            f"({type(e).__name__}: {e}); download them again"
        ) from e


def _read_vocab(folder: Path, config: dict[str, Any], pre: str | None) -> Vocab:
    settings = _settings(folder)
    spm_path = folder / "tokenizer.model"
    spm = read_spm_model(spm_path) if spm_path.is_file() else None
    path = folder / "tokenizer.json"
    if path.is_file():
        tokenizer, parts = _read_tokenizer(path)
        sentencepiece = _is_sentencepiece(parts, path)
    elif spm:
        tokenizer, parts, sentencepiece = None, {}, True
    else:
        raise UserError(
            f"{folder} has neither tokenizer.json nor tokenizer.model; write one with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    entries = _spm_entries(spm) if spm and sentencepiece else _json_entries(parts)
    _add_tokens(entries, settings, parts, sentencepiece)
    special = _special_ids(folder, config, settings, {i: e.text for i, e in entries.items()})
    entries = _pad(entries, config["vocab_size"])
    return Vocab(
        model="llama" if sentencepiece else "gpt2",
        pre=pre or ("default" if sentencepiece or tokenizer is None else identify(tokenizer)),
        tokens=[e.text for e in entries],
        types=[e.kind for e in entries],
        scores=[e.score for e in entries] if sentencepiece else None,
        merges=None if sentencepiece else _merges(parts),
        special=special,
        add_bos=_adds("bos", settings, tokenizer, special, default=sentencepiece),
        add_eos=_adds("eos", settings, tokenizer, special, default=False),
        add_space_prefix=sentencepiece and _prefixes_space(parts, spm, path),
        chat_templates=_chat_templates(folder, settings),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} when the file is absent."""
    if not path.is_file():
        return {}
    return read_json_object(path, TOKENIZER)


def _read_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """tokenizer.json as the object and as its parts."""
    check_json_size(path)
    try:
        return Tokenizer.from_file(str(path)), _read_json(path)
    except Exception as e:  # tokenizers raises nothing more precise
        raise UserError(f"{path} is damaged or no tokenizer.json ({e})") from e


def _settings(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json overlaid by tokenizer_config.json."""
    return _read_json(folder / "special_tokens_map.json") | _read_json(
        folder / "tokenizer_config.json"
    )


def _is_sentencepiece(parts: dict[str, Any], path: Path) -> bool:
    """True for BPE with byte fallback, False for byte-level BPE; UserError for anything else."""
    model = parts["model"]
    if model.get("type") == "BPE" and model.get("byte_fallback"):
        return True
    if model.get("type") == "BPE" and '"ByteLevel"' in json.dumps(parts.get("pre_tokenizer")):
        return False
    raise UserError(
        f"{path}: a {model.get('type')} tokenizer of this shape has no counterpart in llama.cpp's "
        "llama architecture (known: byte-level BPE, BPE with byte fallback)"
    )


class _Entry(NamedTuple):
    """A token: its text, GGUF's type, and its score, which only sentencepiece's use."""

    text: str
    kind: int
    score: float


def _json_entries(parts: dict[str, Any]) -> dict[int, _Entry]:
    """The tokens of a tokenizer.json by id, without those added to its model.

    A merge's rank is the score of what it makes: the higher of two scores is merged first.
    """
    byte_fallback = parts["model"].get("byte_fallback", False)
    ranks: dict[str, int] = {}
    for a, b in _merge_pairs(parts) if byte_fallback else []:
        ranks.setdefault(a + b, len(ranks) + 1)
    unknown = parts["model"].get("unk_token") if byte_fallback else None
    entries = {}
    for token, i in parts["model"]["vocab"].items():
        kind = v.UNKNOWN if token == unknown else v.NORMAL
        if byte_fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            kind = v.BYTE
        score = -float(ranks[token]) if token in ranks else UNREACHABLE
        entries[i] = _Entry(token, kind, score)
    return entries


def _spm_entries(spm: SpmModel) -> dict[int, _Entry]:
    """The tokens of a tokenizer.model by id."""
    columns = zip(spm.pieces, spm.types, spm.scores, strict=True)
    return {i: _Entry(*column) for i, column in enumerate(columns)}


def _add_tokens(
    entries: dict[int, _Entry],
    settings: dict[str, Any],
    parts: dict[str, Any],
    sentencepiece: bool,
) -> None:
    """Put the added tokens into `entries`. Those of tokenizer_config.json replace what is there, as
    llama.cpp's converter has it; tokenizer.json's keep a score, and the unknown token its type."""
    listed = {int(i): added for i, added in settings.get("added_tokens_decoder", {}).items()}
    in_json = {added["id"]: added for added in parts.get("added_tokens", [])}
    for i, added in (in_json | listed).items():
        text, there = added["content"], entries.get(i)
        kind = v.USER_DEFINED
        if added.get("special") or SPECIAL_LOOKS.fullmatch(text):
            kind = v.CONTROL
        elif sentencepiece:
            text = text.replace(v.SPACE, " ")
        score = ADDED
        if sentencepiece and i not in listed and there is not None:
            kind = v.UNKNOWN if there.kind == v.UNKNOWN else kind
            score = there.score
        entries[i] = _Entry(text, kind, score)


def _pad(entries: dict[int, _Entry], rows: int) -> list[_Entry]:
    """One token for each of the embedding's `rows`, [PADn] where the tokenizer has none."""
    last = max(entries)
    if last >= rows:
        raise UserError(
            f"the tokenizer has token {last} ({entries[last].text!r}), but the embedding only "
            f"{rows} rows; remove the token or resize the embedding"
        )
    return [entries.get(i, _Entry(f"[PAD{i}]", v.UNUSED, PADDING)) for i in range(rows)]


def _merge_pairs(parts: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges, which tokenizer.json writes as "a b" or ["a", "b"]."""
    pairs = (m.split(" ") if isinstance(m, str) else m for m in parts["model"]["merges"])
    return [(a, b) for a, b in pairs]


def _merges(parts: dict[str, Any]) -> list[str]:
    return [f"{a} {b}" for a, b in _merge_pairs(parts)]


def _prefixes_space(parts: dict[str, Any], spm: SpmModel | None, path: Path) -> bool:
    """Whether a sentencepiece tokenizer puts a space before the text."""
    if not parts:
        return spm is not None and spm.add_dummy_prefix
    outer = parts.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = outer.get("normalizers", [outer])
    unknown = {s["type"] for s in steps} - {"Prepend", "Replace"}
    if unknown:
        raise UserError(f"{path}: llama.cpp has no normalizer {', '.join(sorted(unknown))}")
    cut = parts.get("pre_tokenizer") or {}
    if cut.get("type") == "Metaspace":
        return cut.get("prepend_scheme", "always") != "never"
    return any(s["type"] == "Prepend" for s in steps)


def _adds(
    role: str,
    settings: dict[str, Any],
    tokenizer: Tokenizer | None,
    special: dict[str, int],
    default: bool,
) -> bool:
    """Whether encoding a text adds bos before it or eos behind it: as set, else as it is done."""
    explicit = settings.get(f"add_{role}_token")
    if role not in special:
        return False
    if isinstance(explicit, bool):
        return explicit
    if tokenizer is None:
        return default
    ids = tokenizer.encode("a").ids
    return bool(ids) and ids[0 if role == "bos" else -1] == special[role]


def _special_ids(
    folder: Path, config: dict[str, Any], settings: dict[str, Any], tokens: dict[int, str]
) -> dict[str, int]:
    """Role -> id: the tokenizer's own words first, then config.json and generation_config.json."""
    ids = {text: i for i, text in tokens.items()}
    generation = _read_json(folder / "generation_config.json")
    special: dict[str, int] = {}
    for role, short in v.SHORT_ROLES.items():
        named = settings.get(f"{short}_token")
        text = named.get("content") if isinstance(named, dict) else named
        if text in ids:
            special[role] = ids[text]
        elif (listed := _listed(short, config, generation)) and listed[0] in tokens:
            special[role] = listed[0]
    ends = [i for i in _listed("eos", generation, config) if i != special.get("eos")]
    if len(ends) > 2:
        raise UserError(f"{folder} names {len(ends) + 1} end tokens; a GGUF file holds three")
    return special | dict(zip(("eot", "eom"), ends, strict=False))


def _listed(short: str, *configs: dict[str, Any]) -> list[int]:
    """The ids that the first config with a {short}_token_id gives, which may be one or a list."""
    for config in configs:
        value = config.get(f"{short}_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) for i in ids):
                raise UserError(f"{short}_token_id must be a token id or several, got {value!r}")
            return ids
    return []


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Name -> template, from chat_template.jinja and its like or from tokenizer_config.json."""
    templates: dict[str, str] = {}
    inline = settings.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        templates |= {entry["name"]: entry["template"] for entry in inline}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates["default"] = read_text(path)
    return templates
