"""Importance matrices: how much each input column of each matrix matters, as llama.cpp stores it.

Of every matrix that multiplies something, the sum of squares of each input column and the number of
tokens summed over; for a stack of experts, of each expert. Their quotient weighs the squared error
of the column's weights. Two files hold that: GGUF with a pair of tensors for each matrix, and the
older .dat, which has the mean alone, times a number of calls. Both are read and written; files are
not trusted.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...calib.safe_files import DamagedFile
from ...kernels.errors import UserError, no_file
from .blocks import CODECS
from .container import LONGEST_NAME
from .reader import GGUFFile
from .writer import Planned, replacing, writing

SUMS, COUNTS = ".in_sum2", ".counts"
MAGIC = b"GGUF"
LEAST_DAT_ENTRY = 12  # bytes: three numbers
REMEDY = "make it again with quantize imatrix"


class Importance(NamedTuple):
    """`sums`: of squares of the input columns, float32 [matrices, columns]; `counts`: tokens,
    float32 [matrices] or [1] for all of them."""

    sums: Tensor
    counts: Tensor

    @property
    def unseen(self) -> int:
        """How many matrices no token reached."""
        return int((self.counts == 0).sum())

    def mean(self) -> Tensor:
        """Mean squares float32 [matrices, columns]; 1 for matrices that no token reached, which
        weighs their columns alike."""
        counts = self.counts.view(-1, 1)
        return torch.where(counts > 0, self.sums / counts.clamp(min=1), 1.0)


class Imatrix(NamedTuple):
    """`entries`: by the names of GGUF tensors. `chunks` of `chunk_size` tokens each (0: unknown)
    of the texts `datasets`."""

    entries: dict[str, Importance]
    datasets: list[str]
    chunks: int
    chunk_size: int

    def weights(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Mean squares float32 [matrices, columns] for the tensor `name`, whose shape has rows
        before columns and experts before them; None where there is no entry. UserError for an entry
        of another size."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        mean = entry.mean()
        *stacked, _, columns = shape
        matrices = prod(stacked)
        if mean.numel() != matrices * columns:
            raise UserError(
                f"the importance matrix has {mean.numel()} values for '{name}', which has "
                f"{matrices} x {columns} input columns: it was made from another model"
            )
        return mean.view(matrices, columns)


def read_imatrix(path: str | Path) -> Imatrix:
    """An importance matrix from GGUF or .dat. UserError where the file is missing or damaged, or
    holds values that are negative or not finite."""
    path = Path(path)
    if not path.is_file():
        raise no_file(path, "importance matrix file")
    with path.open("rb") as f:
        magic = f.read(len(MAGIC))
    found = _read_gguf(path) if magic == MAGIC else _read_dat(path)
    if not found.entries:
        raise UserError(f"{path} holds no importance matrix")
    for name, entry in found.entries.items():
        for values in entry:
            if not bool(((values >= 0) & values.isfinite()).all()):
                bad = int((~((values >= 0) & values.isfinite())).sum())
                found_here = f"{bad} of {values.numel()} values that are negative, NaN or infinite"
                raise DamagedFile(
                    path, "values", found_here, "sums of squares", name, "is no use", REMEDY
                )
    return found


def imatrix_keys(imatrix: Imatrix) -> dict[str, Any]:
    """The keys of a model's file that say by what it was weighed."""
    return {
        "quantize.imatrix.dataset": (imatrix.datasets or [""])[0],
        "quantize.imatrix.entries_count": len(imatrix.entries),
        "quantize.imatrix.chunks_count": imatrix.chunks,
    }


def check_imatrix_name(path: Path) -> None:
    """UserError for a name that does not say which of the two files it is to be."""
    if path.suffix not in (".gguf", ".dat"):
        raise UserError(
            f"an importance matrix is written as NAME.gguf or, the older way, NAME.dat, not {path}"
        )


def write_imatrix(path: Path, imatrix: Imatrix, overwrite: bool = False) -> None:
    """Write `imatrix` to `path`, NAME.gguf or NAME.dat. UserError for another name, and where the
    file exists without `overwrite`."""
    check_imatrix_name(path)
    if path.suffix == ".dat":
        with replacing(path, [path.name], overwrite) as folder:
            (folder / path.name).write_bytes(_dat_bytes(imatrix))
        return
    entries = sorted(imatrix.entries.items())
    tensors = {
        name + suffix: values
        for name, entry in entries
        for suffix, values in ((SUMS, entry.sums), (COUNTS, entry.counts.view(-1, 1)))
    }
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": imatrix.datasets,
        "imatrix.chunk_count": imatrix.chunks,
        "imatrix.chunk_size": imatrix.chunk_size,
    }
    planned = [Planned(n, tuple(v.shape), CODECS["F32"]) for n, v in tensors.items()]
    with writing(path, "imatrix", keys, planned, overwrite) as writer:
        for values in tensors.values():
            writer.write(values.float().contiguous().numpy())


def _read_gguf(path: Path) -> Imatrix:
    file = GGUFFile(path)
    entries = {}
    for name in file.tensors:
        if not name.endswith(SUMS):
            continue
        matrix = name.removesuffix(SUMS)
        if matrix + COUNTS not in file.tensors:
            raise DamagedFile(path, "counts", "sums alone", "sums and counts", matrix)
        sums, counts = file.get(name), file.get(matrix + COUNTS).flatten()
        sums = sums.reshape(-1, sums.shape[-1])
        if len(counts) not in (1, len(sums)):
            found = f"{len(counts)} counts for {len(sums)} matrices"
            raise DamagedFile(path, "counts", found, "one for each", matrix)
        entries[matrix] = Importance(sums, counts)
    chunks, size = (file.keys.get(f"imatrix.{key}", 0) for key in ("chunk_count", "chunk_size"))
    datasets = file.keys.get("imatrix.datasets", [])
    if type(chunks) is not int or type(size) is not int or not isinstance(datasets, list):
        found = f"chunks {chunks!r} of {size!r} of {datasets!r}"
        raise DamagedFile(path, "keys", found[:200], "numbers and a list of texts")
    return Imatrix(entries, datasets, chunks, size)


def _read_dat(path: Path) -> Imatrix:
    data = path.read_bytes()
    at = 0

    def take(size: int, what: str) -> bytes:
        nonlocal at
        if size < 0 or at + size > len(data):
            raise DamagedFile(path, what, f"{size} bytes", f"at most {len(data) - at}")
        at += size
        return data[at - size : at]

    def number(what: str) -> int:
        return struct.unpack("<i", take(4, what))[0]

    entries = {}
    count = struct.unpack("<i", data[:4])[0] if len(data) >= 4 else 0
    if not 0 < count <= len(data) // LEAST_DAT_ENTRY:
        raise UserError(
            f"{path} is no importance matrix, neither of the GGUF kind nor a .dat: give what "
            "quantize imatrix or llama-imatrix has written, or auto (text goes to --calib)"
        )
    for _ in range(number("entries")):
        size = number("name")
        if size > LONGEST_NAME:
            raise DamagedFile(path, "name", f"{size} bytes", f"at most {LONGEST_NAME}")
        name = take(size, "name").decode(errors="replace")
        calls, columns = number("calls"), number("values")
        values = np.frombuffer(take(4 * columns, "values"), "<f4")
        sums = torch.from_numpy(values.copy()).view(1, -1)
        entries[name] = Importance(sums, torch.tensor([float(max(1, calls))]))
    chunks, datasets = 0, []
    if at < len(data):
        chunks = number("chunks")
        datasets.append(take(number("dataset"), "dataset").decode(errors="replace"))
    return Imatrix(entries, datasets, chunks, 0)


def _dat_bytes(imatrix: Imatrix) -> bytes:
    parts = [struct.pack("<i", len(imatrix.entries))]
    for name, entry in sorted(imatrix.entries.items()):
        calls = -(-int(entry.counts.max()) // max(1, imatrix.chunk_size))
        values = (entry.mean() * calls).flatten()
        encoded = name.encode()
        parts += [struct.pack("<i", len(encoded)), encoded]
        parts += [struct.pack("<ii", calls, len(values)), values.float().numpy().tobytes()]
    dataset = (imatrix.datasets or [""])[-1].encode()
    return b"".join([*parts, struct.pack("<ii", imatrix.chunks, len(dataset)), dataset])
