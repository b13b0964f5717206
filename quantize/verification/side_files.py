"""What rides beside the weights: tokenizer, chat template, generation config, code of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...calib.safe_files import TOKENIZER, read_json, read_text
from ...kernels.errors import UserError
from .findings import Finding, finding

TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "tekken.json", "qwen.tiktoken", "tiktoken.model",
)  # fmt: skip
TEMPLATES = ("chat_template.jinja", "chat_template.json")
GENERATION = "generation_config.json"
JSON_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    GENERATION, "chat_template.json", "vocab.json",
)  # fmt: skip
ENDS = ("bos_token_id", "eos_token_id")
CHAT_WORDS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|assistant|>", "[INST]")


def examine_side_files(
    folder: Path, config: Mapping[str, Any], base: Path | None
) -> Iterator[Finding]:
    """base: the original's folder, None where it is not given: then what may have been lost is told
    by hints alone, as warnings."""
    files, found = _read_all(folder)
    yield from found
    original = None if base is None else _read_all(base)[0]
    yield from _tokenizer(folder, files, config, base)
    yield from _token_ids("config.json", config, config)
    yield from _token_ids(GENERATION, files.get(GENERATION), config)
    yield from _template(folder, files, original, base)
    if not os.path.lexists(folder / GENERATION):
        if base is None:
            yield finding("generation config absent", GENERATION, GENERATION, "no such file")
        elif os.path.lexists(base / GENERATION):
            yield finding("generation config lost", GENERATION, f"{GENERATION}, as the original",
                          "no such file")  # fmt: skip
    yield from _custom_code(folder, config)


def _read_all(folder: Path) -> tuple[dict[str, Any], list[Finding]]:
    """The JSON files by name, and those that cannot be read."""
    files: dict[str, Any] = {}
    found = []
    for name in JSON_FILES:
        if not os.path.lexists(folder / name):
            continue
        try:
            files[name] = read_json(folder / name, TOKENIZER)
        except UserError as e:
            found.append(finding("JSON", name, "JSON that transformers reads", e))
    return files, found


def _tokenizer(
    folder: Path, files: Mapping[str, Any], config: Mapping[str, Any], base: Path | None
) -> Iterator[Finding]:
    if not any(os.path.lexists(folder / name) for name in TOKENIZERS):
        lost = base is not None and [n for n in TOKENIZERS if os.path.lexists(base / n)]
        if lost:
            yield finding("tokenizer lost", lost[0], "the original's tokenizer", "none")
        elif base is None:
            yield finding("tokenizer absent", TOKENIZERS[0], "a tokenizer", "none")
        return
    if "tokenizer.json" in files:
        yield from _loads(folder / "tokenizer.json")
    top, size = _largest_id(files.get("tokenizer.json")), _vocabulary(config)
    if top is not None and size is not None and top >= size:
        expected = f"ids below the embedding's {size} rows"
        yield finding("tokenizer size", "tokenizer.json", expected, f"id {top}")


def _loads(path: Path) -> Iterator[Finding]:
    """Whether the library that vLLM and transformers read the file with takes it."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # a plain Exception, or a panic, which is none
        expected = "a tokenizer that the tokenizers library loads"
        yield finding("tokenizer damaged", path.name, expected, e)


def _token_ids(file: str, settings: Any, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Ids that begin and end texts (one or several each), in a file's settings."""
    size = _vocabulary(config)
    if size is None or not isinstance(settings, Mapping):
        return
    for key in ENDS:
        value = settings.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and 0 <= i < size for i in ids):
            yield finding("token id", f"{file}: {key}", f"ids below {size}, the vocabulary", value)


def _largest_id(tokenizer: Any) -> int | None:
    """The largest token id of a tokenizer.json; None where it has none that could be read."""
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        return None
    vocabulary = tokenizer["model"].get("vocab")
    ids: list[Any] = []
    if isinstance(vocabulary, dict):
        ids += vocabulary.values()
    elif isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
        ids.append(len(vocabulary) - 1)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        ids.append(token.get("id") if isinstance(token, dict) else None)
    numbers = [i for i in ids if type(i) is int]
    return max(numbers, default=None)


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    """vocab_size of config.json, or of its language model's part."""
    text = config.get("text_config")
    for part in (text, config):
        if isinstance(part, dict) and type(part.get("vocab_size")) is int:
            return part["vocab_size"]
    return None


def _template(
    folder: Path, files: Mapping[str, Any], original: Mapping[str, Any] | None, base: Path | None
) -> Iterator[Finding]:
    if _has_template(folder, files):
        for name in TEMPLATES[:1]:
            if os.path.lexists(folder / name):
                try:
                    read_text(folder / name)
                except UserError as e:
                    yield finding("chat template lost", name, "a text", e)
        return
    if base is not None:
        if _has_template(base, original or {}):
            yield finding("chat template lost", TEMPLATES[0], "the original's template", "none")
    elif word := _chat_word(files):
        expected = f"a template, since the tokenizer has {word}"
        yield finding("chat template absent", TEMPLATES[0], expected, "none")


def _has_template(folder: Path, files: Mapping[str, Any]) -> bool:
    settings = files.get("tokenizer_config.json")
    inline = isinstance(settings, dict) and bool(settings.get("chat_template"))
    return inline or any(os.path.lexists(folder / name) for name in TEMPLATES)


def _chat_word(files: Mapping[str, Any]) -> str | None:
    """A token that only chat models have."""
    tokenizer = files.get("tokenizer.json")
    added = tokenizer.get("added_tokens") if isinstance(tokenizer, dict) else None
    tokens = added if isinstance(added, list) else []
    words = [t.get("content") for t in tokens if isinstance(t, dict)]
    return next((w for w in CHAT_WORDS if w in words), None)


def _custom_code(folder: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """The modules that auto_map names; those of other repositories are behind a "--"."""
    auto_map = config.get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        if not isinstance(value, str) or "--" in value:
            continue
        file = f"{value.partition('.')[0]}.py"
        if not (folder / file).is_file():
            yield finding("custom code lost", file, f"the module of {value}", "no such file")
