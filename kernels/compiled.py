"""Whether ops that Numba compiles (kernels/tape) can run on this machine."""

from __future__ import annotations

import functools
import platform
from importlib.util import find_spec

import torch

NEEDED = ("avx2", "fma", "f16c")


@functools.cache
def decline_compiled() -> str | None:
    """None, or why compiled ops (kernels/tape) cannot run here."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"is for x86 CPUs, not {platform.machine()}"
    if find_spec("numba") is None:
        return "needs numba, which is not installed"
    from .tape.tiles import host_features

    missing = [name for name in NEEDED if not host_features().get(name)]
    return f"needs a CPU with {', '.join(missing).upper()}" if missing else None


@functools.cache
def prefers_compiled() -> bool:
    """Whether layers are best run so: they can be, and torch has no products with wider
    instructions, which were not measured against."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return not wide and decline_compiled() is None
