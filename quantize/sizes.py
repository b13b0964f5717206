"""Sizes of files as people write them: "5GB", "500MB", "2GiB", llama.cpp's "2G"."""

from __future__ import annotations

import re

from ..kernels.errors import UserError

MAX_SHARD_SIZE = "5GB"  # of a checkpoint's weight file, as the Hub's other programs have it
UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip


def parse_size(size: int | str, what: str) -> int:
    """The number of bytes that `size` stands for; UserError, which names `what`, where it is none.

    A number without a unit is of bytes; GB and G are 10^9 of them, GiB 2^30.
    """
    written = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = None if written is None else UNITS.get(written[2].upper())
    if written is None or unit is None:
        raise UserError(
            f"{what} must be a size such as 5GB, 500MB, 2GiB or a number of bytes, got '{size}'"
        )
    nbytes = int(float(written[1]) * unit) if "." in written[1] else int(written[1]) * unit
    if nbytes < 1:
        raise UserError(f"{what} must be at least 1 byte, got '{size}'")
    return nbytes
