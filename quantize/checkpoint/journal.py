"""The journal of a run: finished layers on disk beside the output, so that a killed run goes on.

A partial folder `OUT.partial` holds journal.json (what is being made, from what) and one
safetensors file with its report for each finished layer. Files are written under a temporary name,
fsynced and renamed: a file that has its name is whole. A run that finds a journal of other inputs
refuses to mix and names the difference.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ...kernels.errors import UserError
from .raw import fsync_folder, write_text

JOURNAL = "journal.json"


class Journal:
    """Finished layers of one run. `resumed`: how many were found when it was opened."""

    def __init__(self, out: Path, identity: dict[str, Any], restart: bool = False) -> None:
        """Open or start the journal of the output folder `out`.

        identity: everything that the output's bytes depend on, as plain JSON values. Raises
        UserError when a journal of another identity is there; `restart` throws it away instead.
        """
        self.folder = partial_folder(out)
        if restart:
            self.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / JOURNAL
        if path.exists():
            self._compare(json.loads(path.read_text(encoding="utf-8")), identity)
        else:
            _replace(path, lambda p: write_text(p, json.dumps(identity, indent=2)))
        self.resumed = sum(1 for _ in self.folder.glob("*.safetensors"))

    def file(self, layer: str) -> Path:
        return self.folder / f"{layer}.safetensors"

    def finished(self, layer: str) -> bool:
        return self.file(layer).exists()

    def load(self, layer: str) -> dict[str, Tensor]:
        """The tensors of a finished layer."""
        return load_file(self.file(layer))

    def report(self, layer: str) -> dict[str, Any]:
        """The report of a finished layer, as it was given to `write`."""
        return json.loads(self._report_file(layer).read_text(encoding="utf-8"))

    def write(self, layer: str, tensors: dict[str, Tensor], report: dict[str, Any]) -> None:
        """Record a finished layer; the tensors come last, since their file is the sign of it."""
        _replace(self._report_file(layer), lambda p: write_text(p, json.dumps(report)))
        _replace(self.file(layer), lambda p: _save_synced(tensors, p))

    def remove(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _report_file(self, layer: str) -> Path:
        return self.folder / f"{layer}.report.json"

    def _compare(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        differences = [
            f"{key}: {old!r} there, {new!r} here" for key, old, new in _differences("", there, here)
        ]
        if differences:
            raise UserError(
                f"{self.folder} holds an unfinished run of other inputs "
                f"({'; '.join(differences)}); repeat that run's command to finish it, or "
                "--restart to throw it away"
            )


def partial_folder(out: Path) -> Path:
    """Where an unfinished run of `out` is kept."""
    return out.with_name(out.name + ".partial")


def unfinished_identity(out: Path) -> dict[str, Any] | None:
    """The identity of the unfinished run of `out`, None when there is none."""
    path = partial_folder(out) / JOURNAL
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _differences(path: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Leaves at which two plain values differ, by dotted path."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in [*a, *(k for k in b if k not in a)]:
            inner = f"{path}.{key}" if path else str(key)
            found += _differences(inner, a.get(key), b.get(key))
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in _differences(f"{path}[{i}]", x, y)]
    return [] if a == b else [(path, a, b)]


def _replace(path: Path, write: Any) -> None:
    """Write under a temporary name, then give the file its name."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)
    fsync_folder(path.parent)


def _save_synced(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(
        {n: t.cpu().contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"}
    )
    with path.open("rb+") as f:
        os.fsync(f.fileno())
