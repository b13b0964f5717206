"""API keys: which are known, and whether one that came is among them."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from ...kernels.errors import UserError

VARIABLE = "LOWBIT_API_KEY"
_MIN_LENGTH = 8


class ApiKeys:
    """Compared by their hashes, each with all of them, so that the time tells nothing of a key. The
    keys themselves are not kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def number(self, given: str) -> int | None:
        """Which key it is, from 1; None for none of them."""
        digest, found = _digest(given), None
        for number, known in enumerate(self._digests, 1):
            if hmac.compare_digest(digest, known):
                found = number
        return found


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """The lines of `file`, empty ones and those that begin with # aside, and the variable
    LOWBIT_API_KEY. UserError where a key cannot be one; it is not told."""
    given: list[tuple[str, str]] = []  # where each stands, and it
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as e:
            raise UserError(f"{file} is no text in UTF-8, as a file of API keys must be") from e
        stripped = enumerate((line.strip() for line in lines), 1)
        given = [(f"line {n} of {file}", k) for n, k in stripped if k and not k.startswith("#")]
        if not given:
            raise UserError(f"{file} holds no API key: write one on each line")
    if from_variable := os.environ.get(VARIABLE, "").strip():
        given.append((VARIABLE, from_variable))
    for where, key in given:
        if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(
                f"{where} cannot be an API key: one must have at least {_MIN_LENGTH} printable "
                "ASCII characters and no space"
            )
    return tuple(dict.fromkeys(key for _, key in given))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
