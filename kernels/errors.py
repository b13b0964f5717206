"""The one root of errors that are the user's to mend.

Every folder raises `UserError` (or a subclass of its own) with a message that names the value, the
limit and the remedy. The command line prints that message and exits with code 2; anything else that
escapes is a fault of ours and exits with 1. `assert` is for our own invariants.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Input that cannot be used as given. The message names the value, the limit and the remedy."""


def no_file(path: str | Path, what: str, remedy: str = "") -> UserError:
    """What is to be said where `path` is no file. what: that was asked for, "recipe file"."""
    there = Path(path)
    said = f"{path} is a folder, not a {what}" if there.is_dir() else f"no such {what}: {path}"
    return UserError(f"{said}; {remedy}" if remedy else said)


def counted(n: int, what: str, several: str | None = None) -> str:
    """A number of things in a message: "1 error", "2 errors". several: the plural, `what` with an
    s where none is given."""
    return f"{n:,} {what if n == 1 else several or f'{what}s'}"


def did_you_mean(value: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A message's hint at the nearest of the known names; empty where none is near."""
    near = difflib.get_close_matches(value, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""
