"""Keep memory that batches use in turns in one place."""

from __future__ import annotations

import ctypes
import platform

M_ARENA_MAX = -8  # glibc's malloc.h


def share_one_arena() -> None:
    """Let all threads from now on allocate from malloc's one arena (glibc; elsewhere nothing).

    glibc gives each thread an arena of its own and keeps what was freed there. Batches that run in
    threads by turns would each keep a batch's temporaries resident, although one set is ever in use
    (measured on SmolLM2, 128 rows of 512 tokens: 3.8 GB instead of 2.9 GB).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
