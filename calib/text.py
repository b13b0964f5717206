"""Text by name to token rows, for calibration and evaluation.

Whatever the source is, it becomes one string with its SHA-256, so that every number measured on it
can say what it was measured on. Of a named source, calibration and evaluation never get the same
passage. The string is tokenized once, without special tokens, and cut into windows that do not
overlap; nothing is padded. (The first N windows: the rule by which quantizers are compared.)
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import textwrap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from . import hub
from .safe_files import check_side_files

Split = Literal["calibration", "evaluation"]

WIKITEXT, WIKITEXT_CONFIG = "Salesforce/wikitext", "wikitext-2-raw-v1"
WIKITEXT_SPLITS: dict[Split, tuple[str, ...]] = {
    "calibration": ("validation", "train"),
    "evaluation": ("test",),
}
DATASET_SPLITS: dict[Split, tuple[str, ...]] = {
    "calibration": ("train",),
    "evaluation": ("test", "validation", "valid", "dev"),
}
PYDOC_CHUNK = 16  # paragraphs
PYDOC_EVALUATION = 4  # one chunk in so many is evaluation's
CHARS_PER_TOKEN = 16  # a prefix of so many characters a token is tried before the whole text
SLACK = 256  # tokens by which a prefix must exceed the need: those near its cut may differ


class Text(NamedTuple):
    """A text and its identity. `sha256` is of its UTF-8 bytes: for a .txt file, the file's own."""

    text: str
    name: str
    sha256: str
    description: str


def load_text(source: str, split: Split, tokenizer: Any = None) -> Text:
    """The text of `source`.

    wikitext    WikiText-2 (raw) from the Hub: validation and train, or test for evaluation
    pydoc       the language reference that Python ships for help(): three quarters, or the
                remaining quarter for evaluation; no paragraph is in both
    auto        wikitext where the Hub answers, else pydoc; `description` says why
    FILE.jsonl  one {"text": "..."} or {"messages": [...]} a line; messages go through the chat
                template of `tokenizer`
    FILE        any other file, as it is, whatever the split
    OWNER/NAME[/CONFIG][:SPLIT[:COLUMN]]  a data set on the Hub or in a folder; split and column
                by their usual names where none is given

    Raises UserError when the source cannot be had, is empty or is not such text.
    """
    named = {"wikitext": _wikitext, "pydoc": _pydoc, "auto": _auto}
    if source in named:
        text = named[source](split)
    elif Path(source).is_file():
        text = _file(Path(source), tokenizer)
    elif hub.names_dataset(source):
        text = _documents(hub.dataset_rows(source, DATASET_SPLITS[split]), tokenizer)
    elif source and Path(source).is_dir():
        raise UserError(f"{source} is a folder, not a text file; name a file in it")
    else:
        raise UserError(
            f"no text file '{source}', and it is not one of {', '.join(named)} or a data set "
            "OWNER/NAME[:SPLIT[:COLUMN]]"
        )
    if not text.text.strip():
        raise UserError(f"{text.name} holds no text; {hub.REMEDY}")
    return text


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model folder; UserError when there is none."""
    from transformers import AutoTokenizer

    check_side_files(Path(model))
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as e:  # a damaged tokenizer.json makes the tokenizers library raise just that
        reason = textwrap.shorten(str(e), 160, placeholder=" ...")
        raise UserError(
            f"{model} has no tokenizer that transformers can load (tokenizer.json or "
            f"tokenizer.model); copy the original model's tokenizer files there ({reason})"
        ) from e


def tokenize(text: str, tokenizer: Any, limit: int | None = None) -> Tensor:
    """Token ids int64 [n] of `text`, no special tokens added; at most the first `limit` of them.

    With a limit, a long text is read only as far as needed: what a token is does not depend on the
    text thousands of characters later.
    """
    if limit is not None:
        chars = CHARS_PER_TOKEN * (limit + SLACK)
        while chars < len(text):
            ids = _ids(text[:chars], tokenizer)
            if len(ids) >= limit + SLACK:
                return torch.tensor(ids[:limit], dtype=torch.long)
            chars *= 2
    return torch.tensor(_ids(text, tokenizer)[:limit], dtype=torch.long)


def token_rows(
    text: Text, tokenizer: Any, samples: int, seq_len: int, seed: int | None = None
) -> Tensor:
    """int64 [samples, seq_len]: windows of `text` that do not overlap.

    The first ones in order; with a `seed`, a draw without replacement from all of them. Raises
    UserError when the text holds fewer.
    """
    if samples < 1 or seq_len < 1:
        raise UserError(f"samples and seq_len must be at least 1, got {samples} and {seq_len}")
    ids = tokenize(text.text, tokenizer, samples * seq_len if seed is None else None)
    available = len(ids) // seq_len
    if available < samples:
        raise UserError(
            f"{text.name} holds {available} windows of {seq_len} tokens ({len(ids)} tokens), but "
            f"{samples} were asked for; lower --samples or --seq-len, or give a longer text"
        )
    windows = ids[: available * seq_len].view(available, seq_len)
    if seed is None:
        return windows
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return windows[order[:samples]]


def _ids(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _text(text: str, name: str, description: str) -> Text:
    return Text(text, name, hashlib.sha256(text.encode("utf-8")).hexdigest(), description)


def _auto(split: Split) -> Text:
    try:
        return _wikitext(split)
    except UserError as e:
        text, reason = _pydoc(split), str(e).rpartition(";")[0]
        return text._replace(description=f"{text.description} (not wikitext: {reason})")


def _wikitext(split: Split) -> Text:
    """Rows joined by a blank line, as in GPTQ's code and transformers' perplexity recipe."""
    names = WIKITEXT_SPLITS[split]
    rows = [r for n in names for r in hub.load_split(WIKITEXT, WIKITEXT_CONFIG, n)["text"]]
    where = "+".join(names)
    return _text(
        "\n\n".join(rows),
        f"{WIKITEXT_CONFIG} {where}",
        f"{WIKITEXT}, {WIKITEXT_CONFIG}, {where}, rows joined by a blank line",
    )


def _pydoc(split: Split) -> Text:
    """Paragraphs in order of topic, repeats dropped (topics quote each other), dealt in chunks."""
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise UserError("this Python has no pydoc_data; give a text file instead of pydoc") from e
    unique: dict[str, str] = {}
    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            unique.setdefault(" ".join(paragraph.split()), paragraph.rstrip())
    unique.pop("", None)
    chosen = [
        paragraph
        for i, paragraph in enumerate(unique.values())
        if (i // PYDOC_CHUNK % PYDOC_EVALUATION == PYDOC_EVALUATION - 1) == (split == "evaluation")
    ]
    python = f"Python {platform.python_version()}"
    return _text(
        "\n\n".join(chosen),
        f"pydoc {split} ({python})",
        f"pydoc_data.topics of {python}, {split} part, repeated paragraphs dropped",
    )


def _file(path: Path, tokenizer: Any) -> Text:
    try:
        raw = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text ({e}); convert it to UTF-8") from e
    if path.suffix != ".jsonl":
        return _text(raw, path.name, f"the file {path.name}")
    rows = [_json_row(path, i, line) for i, line in enumerate(raw.split("\n"), 1) if line.strip()]
    return _documents(
        hub.Rows(rows, path.name, f"the file {path.name}, {len(rows)} documents"), tokenizer
    )


def _json_row(path: Path, number: int, line: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}, line {number} is not JSON: {e}") from e
    for key, kind in (("text", str), ("messages", list)):
        if isinstance(row, dict) and isinstance(row.get(key), kind):
            return row[key]
    raise UserError(f'{path}, line {number} is not {{"text": "..."}} or {{"messages": [...]}}')


def _documents(source: hub.Rows, tokenizer: Any) -> Text:
    """Strings are joined by a blank line; conversations by nothing: their template ends them."""
    rendered = [_render(row, source.name, tokenizer) for row in source.rows]
    separator = "\n\n" if all(isinstance(row, str) for row in source.rows) else ""
    return _text(separator.join(rendered), source.name, source.description)


def _render(row: Any, name: str, tokenizer: Any) -> str:
    if isinstance(row, str):
        return row
    if not isinstance(row, list):
        raise UserError(f"{name}: a row holds a {type(row).__name__}, not text or messages")
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"{name} holds messages, but the model's tokenizer has no chat template; give text"
        )
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(row, tokenize=False)
    except (TemplateError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{name}: the chat template refuses a conversation: {e}") from e
