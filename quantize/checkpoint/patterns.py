"""Regular expressions that a checkpoint's config holds, matched with module names in bounded time.

Python's engine goes back and tries again: what varies within a repeat takes time exponential in
the name's length, what varies in a row multiplies. Configs are not trusted, so the first is
refused, the second limited, names limited in length, and the time spent on a pattern is counted.
"""

from __future__ import annotations

import math
import re
import time
from functools import lru_cache
from typing import Any

from ...kernels.errors import UserError

if hasattr(re, "_parser"):
    _parser: Any = re._parser  # type: ignore[attr-defined]
else:  # Python 3.10
    import sre_parse as _parser

LONGEST_PATTERN = 2000
LONGEST_NAME = 256
MOST_BITS = 32.0  # log2 of the ways in which a pattern may be tried
REPEAT_BITS = 6.5  # of one repeat without a limit: four leave room for some alternatives
MOST_SECONDS = 10.0  # on all names together
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class NamePattern:
    """A compiled pattern. UserError for one that could take very long, re.error for one that is
    none."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST_PATTERN:
            raise UserError(
                f"the pattern '{text[:40]}...' has {len(text)} characters; at most "
                f"{LONGEST_PATTERN} are matched"
            )
        self.text = text
        self._compiled = re.compile(text)
        self._seconds = 0.0
        if _ways(_parser.parse(text), text) > MOST_BITS:
            raise _too_slow(text, "too many repeats and alternatives")

    def match(self, name: str) -> bool:
        """Whether the pattern matches from the start of `name`; UserError once it took too long."""
        if len(name) > LONGEST_NAME:
            return False
        start = time.perf_counter()
        found = self._compiled.match(name) is not None
        self._seconds += time.perf_counter() - start
        if self._seconds > MOST_SECONDS:
            raise UserError(f"the pattern '{self.text[:80]}' takes too long to match names")
        return found


@lru_cache(maxsize=1 << 14)
def name_pattern(text: str) -> NamePattern:
    """The pattern, compiled once."""
    return NamePattern(text)


def _ways(parsed: Any, text: str, repeated: bool = False) -> float:
    """log2 of the ways to try a parsed pattern; UserError for what varies within a repeat and for
    what refers back to a group."""
    bits = 0.0
    for op, argument in parsed:
        name = str(op)
        here = 0.0
        if name in ("GROUPREF", "GROUPREF_EXISTS"):
            raise _too_slow(text, "a reference to a group")
        if name in REPEATS and argument[0] != argument[1]:
            here = min(REPEAT_BITS, math.log2(int(argument[1]) - int(argument[0]) + 1) + 1)
        elif name == "BRANCH":
            here = math.log2(len(argument[1]))
        if here and repeated:
            raise _too_slow(text, "what varies within a repeat")
        inside = repeated or (name in REPEATS and argument[1] > 1)
        bits += here + sum(_ways(part, text, inside) for part in _parts(name, argument))
    return bits


def _too_slow(text: str, why: str) -> UserError:
    return UserError(
        f"the pattern '{text[:80]}' has {why}, which may take very long to match; write it "
        "shorter, or name the modules"
    )


def _parts(name: str, argument: Any) -> list[Any]:
    """The patterns inside an operation."""
    if name in REPEATS:
        return [argument[2]]
    if name == "SUBPATTERN":
        return [argument[3]]
    if name == "BRANCH":
        return list(argument[1])
    if name in ("ASSERT", "ASSERT_NOT"):
        return [argument[1]]
    return [argument] if name == "ATOMIC_GROUP" else []
