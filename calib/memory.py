"""Keep memory that batches use in turns in one place, and hand back what a layer leaves behind.

glibc only; elsewhere both functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEPT_BYTES = 1 << 30  # free memory at the heap's top that is not handed back each time
HEAP_BYTES = 1 << 25  # tensors up to this size (glibc's limit) come from the heap: no fresh pages


def keep_freed_memory() -> None:
    """Let malloc keep what a batch frees for the next one: clearing fresh pages in between would
    cost more than the memory is worth."""
    if _has_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, HEAP_BYTES)


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
