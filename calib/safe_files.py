"""Files of folders that are not trusted: where they may lie, and how much of them is read.

A model folder may come from anyone. A file is read only when its name is a plain one, it is a
regular file, and it lies in the folder once links are followed; JSON only up to a size, a number of
values and a depth, all three of which bound the memory that it takes. What breaks a rule is a
DamagedFile, which says which rule and what was found. The readers of safetensors
(calib/safetensors_file.py) and GGUF (quantize/gguf/reader.py) raise the same.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels.errors import UserError

LONGEST_NAME = 255  # bytes, as of the usual file systems
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half a character, unless the other half follows


class DamagedFile(UserError):
    """A file that breaks its format, or may not be read.

    fault: the broken rule in a word or two, such as "offsets". expected, found: in words. tensor:
    the one at fault, where it is one.
    """

    def __init__(
        self,
        path: str | Path,
        fault: str,
        found: str,
        expected: str,
        tensor: str | None = None,
        what: str = "is truncated or damaged",
        remedy: str = "download it again",
    ) -> None:
        self.path, self.fault, self.tensor = Path(path), fault, tensor
        self.found, self.expected = found, expected
        about = f"tensor '{tensor}' has " if tensor is not None else ""
        super().__init__(f"{path} {what} ({about}{found}; expected {expected}); {remedy}")


class JsonLimits(NamedTuple):
    """The largest JSON file that is read: in bytes, in values (an upper bound is counted), in
    containers within each other."""

    nbytes: int
    values: int
    depth: int = 64


CONFIG = JsonLimits(32 << 20, 2_000_000)
INDEX = JsonLimits(128 << 20, 4_000_000)
TOKENIZER = JsonLimits(256 << 20, 8_000_000)
LARGEST_SIDE_FILE = 64 << 20  # bytes of a chat template, a tokenizer.model and the like
READ_BY_TRANSFORMERS = {
    "config.json": CONFIG, "generation_config.json": CONFIG, "tokenizer_config.json": INDEX,
    "special_tokens_map.json": CONFIG, "added_tokens.json": INDEX, "vocab.json": TOKENIZER,
    "tokenizer.json": TOKENIZER, "chat_template.json": CONFIG, "processor_config.json": CONFIG,
    "preprocessor_config.json": CONFIG,
}  # fmt: skip
TEXTS_READ_BY_TRANSFORMERS = (
    "tokenizer.model", "chat_template.jinja", "vocab.txt", "merges.txt", "spiece.model",
)  # fmt: skip


def checked_path(folder: Path, name: str) -> Path:
    """The regular file `name` of `folder`; DamagedFile for a name with a folder in it, for a link
    that leaves the folder, and for what is no file.

    The Hub's cache is let through: its snapshots are links into its own `blobs`.
    """
    path = folder / name
    if not is_plain_name(name):
        raise DamagedFile(
            folder, "file name", f"the file name {name!r}", "the name of a file in that folder",
            what="names a file that is not read", remedy="do not use this folder",
        )  # fmt: skip
    if not lies_in(path, folder):
        raise DamagedFile(
            path, "link", "a link that leaves the folder or ends nowhere", "a file in the folder",
            what="is not read", remedy="put the file itself there",
        )  # fmt: skip
    if not path.is_file():
        raise DamagedFile(
            path, "no file", "a folder, a device or nothing", "a regular file",
            what="is not read", remedy="put the file itself there",
        )  # fmt: skip
    return path


def is_plain_name(name: str) -> bool:
    """Whether `name` can only be that of a file in the folder it is looked up in."""
    return (
        name not in ("", ".", "..")
        and not any(c in name for c in "/\\\0")
        and name.isprintable()
        and len(name.encode("utf-8", "surrogatepass")) <= LONGEST_NAME
    )


def lies_in(path: Path, folder: Path) -> bool:
    """Whether `path`, its links followed, exists within `folder` or where the Hub's cache keeps the
    files of that snapshot."""
    try:
        target, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        return False
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    return target.is_relative_to(root) or target.is_relative_to(blobs)


def read_json(path: Path, limits: JsonLimits = CONFIG) -> Any:
    """The value of a JSON file in a model folder; DamagedFile when it is none, holds a key twice or
    goes beyond `limits`. The file must exist."""
    return parse_json(_bounded(path, limits), path, limits)


def read_json_object(path: Path, limits: JsonLimits = CONFIG) -> dict[str, Any]:
    """As `read_json`, for a file that must hold an object."""
    value = read_json(path, limits)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def parse_json(data: bytes, path: Path, limits: JsonLimits) -> Any:
    """The value of the UTF-8 text `data`, which was found in the file `path`; as `read_json`."""
    _check_count(data, path, limits)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_twins)
        if SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        too_deep = _depth_exceeds(value, limits.depth)
    except RecursionError:
        too_deep = True
    except ValueError as e:
        expected = "JSON in UTF-8, each key once"
        raise DamagedFile(path, "JSON", str(e), expected, what="is not valid JSON") from e
    if too_deep:
        raise _bomb(path, "deeper nesting", f"at most {limits.depth} containers in each other")
    return value


def check_side_files(folder: Path) -> None:
    """DamagedFile when a file of `folder` that transformers would read should not be given to it,
    for its size or where it lies."""
    for name, limits in READ_BY_TRANSFORMERS.items():
        if os.path.lexists(folder / name):
            check_json_size(folder / name, limits)
    for name in TEXTS_READ_BY_TRANSFORMERS:
        if os.path.lexists(folder / name):
            _checked_size(folder / name, LARGEST_SIDE_FILE)


def check_json_size(path: Path, limits: JsonLimits = TOKENIZER) -> None:
    """DamagedFile when the JSON file `path` should not be given to another program's reader: it is
    too large, holds too many values or is no file of its folder."""
    _bounded(path, limits)


def read_bytes(path: Path, limit: int = LARGEST_SIDE_FILE) -> bytes:
    """What a file of a model folder holds; DamagedFile beyond `limit` bytes."""
    _checked_size(path, limit)
    return path.read_bytes()


def read_text(path: Path, limit: int = LARGEST_SIDE_FILE) -> str:
    """The UTF-8 text of a file of a model folder; DamagedFile when it is none."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as e:
        raise DamagedFile(path, "text", str(e), "UTF-8", what="is not text") from e


def _checked_size(path: Path, limit: int) -> None:
    checked_path(path.parent, path.name)
    size = path.stat().st_size
    if size > limit:
        raise DamagedFile(
            path, "size", f"{size:,} bytes", f"at most {limit:,} bytes", what="is not read"
        )


def _bounded(path: Path, limits: JsonLimits) -> bytes:
    """What the file holds, which is within the limits of size and number."""
    data = read_bytes(path, limits.nbytes)
    _check_count(data, path, limits)
    return data


def _check_count(data: bytes, path: Path, limits: JsonLimits) -> None:
    """Every value but the first stands behind one of three characters: counting those bounds the
    number of values before any is made."""
    values = sum(data.count(c) for c in (b",", b"[", b"{"))
    if values > limits.values:
        raise _bomb(path, f"up to {values:,} values", f"at most {limits.values:,}")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twin[:80]!r} stands in one object twice")
    return found


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Whether more than `limit` containers stand within each other; no recursion."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _bomb(path: Path, found: str, expected: str) -> DamagedFile:
    return DamagedFile(path, "JSON size", found, expected, what="is not read")
