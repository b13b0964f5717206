"""Everything that rides with a model's weights: tokenizer, chat template, generation config, code.

Checked before the long work begins: a file that is linked from outside the folder would be read and
published with the checkpoint, and folders linked into each other have no end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...calib.safe_files import DamagedFile, lies_in
from ...calib.shards import INDEX
from ...kernels.errors import UserError
from .files import FileRecord, copy_file, fsync_path
from .manifest import MANIFEST

REPORT = "quantization_report.json"
OF_ITS_OWN = (  # files that say how the folder they lie in is stored
    "config.json", INDEX, MANIFEST, REPORT, "quantize_config.json", "quant_config.json",
)  # fmt: skip
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".pkl",
    ".bin.index.json",
)  # fmt: skip
MOST = 100_000  # files and folders


def side_files(source: Path) -> list[str]:
    """Paths in the model folder `source` of what rides along, a folder before what is in it.

    DamagedFile for a link that leaves the folder or leads to a folder, and for what is no file.
    """
    found = list(_below(source, source, ""))
    if len(found) > MOST:
        raise UserError(f"{source} holds more than {MOST:,} files beside its weights")
    return found


def copy_side_files(source: Path, folder: Path) -> dict[str, FileRecord]:
    """Copy what rides along; returns the records of the copies by their paths in `folder`."""
    copied: dict[str, FileRecord] = {}
    made = [folder]
    for name in side_files(source):
        if (source / name).is_dir():
            (folder / name).mkdir()
            made.append(folder / name)
        else:
            copied[name] = copy_file(source / name, folder / name)
    for inner in reversed(made):
        fsync_path(inner)
    return copied


def _below(root: Path, at: Path, prefix: str) -> Iterator[str]:
    for entry in sorted(os.scandir(at), key=lambda e: e.name):
        if entry.name.startswith(".") or entry.name.endswith(WEIGHT_SUFFIXES):
            continue
        if not prefix and entry.name in OF_ITS_OWN:
            continue
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield prefix + entry.name
            yield from _below(root, path, f"{prefix}{entry.name}/")
        elif path.is_file() and lies_in(path, root):
            yield prefix + entry.name
        else:
            found = "a link that leaves it or leads to a folder" if path.is_symlink() else "no file"
            raise DamagedFile(
                path, "link", found, "a file of the model's folder", what="is not copied",
                remedy="remove it, or put the file itself there",
            )  # fmt: skip
