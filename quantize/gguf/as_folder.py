"""A GGUF file as the Hugging Face folder that quantizing, running and measuring take.

The folder holds the very values of the file (float32 for what was quantized), its tokenizer and its
config. It is made once and kept in the user's cache under a name that changes when the file does; a
note in it says of what file it is made, so that sizes are those of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...calib.safe_files import read_json_object
from ...kernels.errors import UserError
from ..checkpoint.workspace import clear_left_over
from .type_total import TypeTotal

if TYPE_CHECKING:
    from .reader import GGUFFile

MAGIC = b"GGUF"
NOTE = ".gguf.json"  # hidden, so that it does not ride along with what is made of the folder
VERSION = 1  # of what is made of a file; another one is another folder


class Contents(NamedTuple):
    """A file's size. `nbytes`: of all its parts on disk; `tensor_bytes`: of the tensors alone.
    `types`: block type -> TypeTotal, the largest first."""

    path: str
    nbytes: int
    tensor_bytes: int
    weights: int
    types: dict[str, TypeTotal]

    @property
    def bits_per_weight(self) -> float:
        """Scales and minima counted, header and metadata not."""
        return 8 * self.tensor_bytes / self.weights


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF files do."""
    if not path.is_file():
        return False
    with path.open("rb") as f:
        return f.read(len(MAGIC)) == MAGIC


def folder_of(path: Path, say: Callable[[str], None], cache: Path | None = None) -> Path:
    """The folder of the GGUF file `path`, made where it is not there yet; `say` is told so.

    cache: None for the user's (`default_cache`). UserError as `to_hf.gguf_to_hf` raises.
    """
    from .reader import GGUFFile
    from .to_hf import gguf_to_hf

    file = GGUFFile(path)
    folder = (cache or default_cache()) / "gguf" / f"{path.stem}-{_key(file.paths)}"
    if not folder.is_dir():
        found = contents(file)
        say(f"{path.name} is dequantized to {folder}, which may be removed at any time")
        note = {**found._asdict(), "types": {k: list(t) for k, t in found.types.items()}}
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            clear_left_over(folder.parent)
            gguf_to_hf(path, folder, dtype=None, extra={NOTE: json.dumps(note)})
        except OSError as e:
            raise UserError(
                f"cannot write {folder.parent}: {e.strerror or e}; XDG_CACHE_HOME names another "
                "folder for it"
            ) from e
        except UserError:
            if not folder.is_dir():  # else another process was first
                raise
    return folder


def contents(file: GGUFFile) -> Contents:
    """What a GGUFFile holds."""
    types: dict[str, TypeTotal] = {}
    for stored in file.tensors.values():
        old = types.get(stored.kind, TypeTotal(0, 0, 0))
        types[stored.kind] = TypeTotal(
            old.tensors + 1, old.weights + prod(stored.shape), old.nbytes + stored.nbytes
        )
    ordered = dict(sorted(types.items(), key=lambda item: -item[1].nbytes))
    return Contents(
        path=str(file.path),
        nbytes=file.nbytes,
        tensor_bytes=sum(t.nbytes for t in types.values()),
        weights=sum(t.weights for t in types.values()),
        types=ordered,
    )


def contents_behind(folder: Path) -> Contents | None:
    """The contents of the file that `folder` stands for; None for a folder of another origin."""
    if not (folder / NOTE).is_file():
        return None
    note = read_json_object(folder / NOTE)
    types = {kind: TypeTotal(*total) for kind, total in note["types"].items()}
    return Contents(**{**note, "types": types})


def default_cache() -> Path:
    """$XDG_CACHE_HOME/lowbit, or ~/.cache/lowbit where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lowbit"


def _key(paths: list[Path]) -> str:
    """A name for the file as it is now: of its place, size and time."""
    digest = hashlib.sha256(str(VERSION).encode())
    for path in paths:
        stat = path.stat()
        digest.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
