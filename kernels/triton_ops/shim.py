"""Triton where it is installed: the one place that knows that it may not be.

Kernel files take `tl` and `jit` from here. Without Triton (it exists for Linux alone) they import
all the same, and a launch raises. With TRITON_INTERPRET=1 at the first import kernels run in
Triton's interpreter, on CPU tensors; that cannot change later in a process, for `triton.jit` looks
once.

What a compile-time constant is worth, pyright cannot know: kernel files begin with a line that
turns off the complaints about it.

The interpreter's limits, which kernels respect: no inline assembly and no `dot_scaled`; bfloat16
is right only when it is upcast to float32 right after the load (`device_math.dot` does), and
rounded wrongly at a store, so tests use float16 and float32 there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import UserError

Backend = Literal["cuda", "hip", "interpreter"]

if TYPE_CHECKING:
    import triton
    import triton.language as tl
    from triton import knobs
else:
    try:
        import triton
        import triton.language as tl
        from triton import knobs
    except ImportError:
        triton = tl = None

constexpr_function: Any = getattr(triton, "constexpr_function", lambda function: function)
"""Marks a plain function of compile-time constants that kernels call while they are compiled."""

INTERPRETED: Any = triton and tl.constexpr(bool(knobs.runtime.interpret))
"""Whether kernels run in the interpreter; a compile-time constant, to be used inside kernels."""


class MissingKernel:
    """What stands for a kernel where Triton is not installed: launching it raises."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        raise UserError(f"kernel '{self.__name__}' needs Triton: pip install triton (Linux)")


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`; without Triton, something that raises when it is launched."""
    return MissingKernel(function) if triton is None else triton.jit(function)


def decline_triton(device: str) -> str | None:
    """Why Triton kernels cannot run tensors of `device` ("cuda", which ROCm's are too, or another)
    here, or None. Imports nothing."""
    if device.partition(":")[0] != "cuda":
        return f"runs on cuda, not {device}"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    return None


def current_backend() -> Backend:
    """What a launch from here runs on: kernels with assembly for one target ask."""
    if INTERPRETED is not None and INTERPRETED.value:
        return "interpreter"
    return "hip" if torch.version.hip else "cuda"
