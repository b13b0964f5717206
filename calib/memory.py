"""Keep memory that batches use in turns in one place, and hand back what a layer leaves behind.

glibc only; elsewhere both functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import platform

M_ARENA_MAX = -8  # glibc's malloc.h


def share_one_arena() -> None:
    """Let all threads from now on allocate from malloc's one arena.

    glibc gives each thread an arena of its own and keeps what was freed there. Batches that run in
    threads by turns would each keep their temporaries resident, although one set is ever in use.
    """
    if _has_glibc():
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def release_free_memory() -> None:
    """Return free memory to the system.

    What batches hold while they wait is freed in another order than it was taken; left alone, the
    holes add up from layer to layer.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
