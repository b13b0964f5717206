"""What serving holds in memory, by what it is for.

Bytes of tensors are counted, each storage once. What activations took is the most that was held
beside what was held before the first load: on a GPU by torch's allocator; on a CPU by the system's
count of resident pages, less those pages of the pools that the load was the first to touch.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quantize.planning.machine import resident_bytes
from ...runtime import LLM
from ...runtime.held import nbytes_of, pools, weight_bytes
from ..speed import peak_memory

RESET_PEAK = Path("/proc/self/clear_refs")


class MemorySplit(NamedTuple):
    """Bytes. kv: of all blocks; kv_touched: of those pages of them that are there (the system gives
    a page when it is written to; None where it does not tell). activations: with what the
    allocator holds beside; None where the system does not count so. process: resident at most,
    code and libraries included."""

    weights: int
    kv: int
    kv_touched: int | None
    activations: int | None
    process: int


class MemoryWatch:
    """Of the loads between its start and `split`."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._pools, self._device = llm, pools(llm), llm.device
        self._counts = _reset_peak(self._device)
        self._before = _held(self._device)
        self._touched = resident_bytes_of(self._pools, self._device)

    def split(self) -> MemorySplit:
        weights = weight_bytes(self._llm)
        touched = resident_bytes_of(self._pools, self._device)
        activations = None
        if self._counts:
            new = 0 if touched is None or self._touched is None else touched - self._touched
            activations = max(0, _peak(self._device) - self._before - new)
        return MemorySplit(weights, nbytes_of(self._pools), touched, activations, peak_memory())


def _reset_peak(device: torch.device) -> bool:
    """Whether the peak is that of what comes from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        RESET_PEAK.write_text("5")
    except OSError:
        return False
    return True


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()


def resident_bytes_of(pools: list[Tensor], device: torch.device) -> int | None:
    """Bytes of the pools' pages that are resident; on a GPU all are, and were before."""
    if device.type == "cuda":
        return nbytes_of(pools)
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in pools)}  # some share one
    pages = [resident_pages(storage) for storage in storages.values()]
    return None if any(p is None for p in pages) else sum(p for p in pages if p is not None)


def resident_pages(storage: Any) -> int | None:
    """Bytes of a storage in memory, by whole pages; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    page = mmap.PAGESIZE
    begin = storage.data_ptr() // page * page
    count = -(-(storage.data_ptr() + storage.nbytes() - begin) // page)
    if not storage.nbytes():
        return 0
    flags = (ctypes.c_ubyte * count)()
    library = ctypes.CDLL(None, use_errno=True)
    asked = library.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * page), flags)
    return None if asked else min(sum(f & 1 for f in bytes(flags)) * page, storage.nbytes())
