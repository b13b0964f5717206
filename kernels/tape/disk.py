"""Compiled code kept on disk, so that only a first run waits for the compiler.

Numba tells kept code apart by the bytes of a function and what it closes over. Functions that were
made elsewhere, as the ops of a tape are, have other bytes in each process; so here the key is a
name, and the source of this whole package.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba.core.caching import FunctionCache, IndexDataCacheFile

F = TypeVar("F", bound=Callable[..., Any])


class _NamedCache(FunctionCache):
    """Of one name and one state of the source, in files of their own: processes that keep code at
    the same time must not take each other's numbers for it."""

    def __init__(self, function: Any, name: str) -> None:
        super().__init__(function)
        self._key = hashlib.sha256(f"{name} {_sources()}".encode()).hexdigest()[:16]
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=f"{function.__name__}-{self._key}",
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._key


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def named(*of: object) -> Callable[[F], F]:
    """Give a function that is made anew for each `of` a name of its own. Code from disk is linked
    by names: two of one name, kept by two processes, would be the same code in a third."""

    def rename(function: F) -> F:
        key = hashlib.sha256(repr(of).encode()).hexdigest()[:12]
        function.__name__ += f"_{key}"
        function.__qualname__ += f"_{key}"
        return function

    return rename


def keep_on_disk(compiled: Any, name: str) -> None:
    """Keep what Numba compiles for `compiled`, a function of numba.njit that is the same for one
    `name`, beside its source or, where that cannot be written, in the user's cache."""
    compiled._cache = _NamedCache(compiled.py_func, name)
