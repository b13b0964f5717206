"""The one way to launch a kernel, and to record what would be launched.

A launcher says grid, arguments, compile-time constants and warps; `launch` runs them. Under
`recording` nothing runs: launches are kept, so that the audit compiles the very kernels, constants
and argument types that a call with tensors of some shape would run, for a device that is not
there. The tensors are then on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .shim import Backend, current_backend


class Warps(NamedTuple):
    """How a program is run: warps in it, and loads in flight (stages of the software pipeline)."""

    num_warps: int = 4
    num_stages: int = 3


class Target(NamedTuple):
    """What kernels are compiled for: a backend, and its architecture: 80, 90, 100 or "gfx942"."""

    backend: Backend
    arch: int | str


class Launch(NamedTuple):
    """One launch. args: by name, in the kernel's order; None for an operand that is left out."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Tensor | int | float | None]
    constants: dict[str, Any]
    warps: Warps


class _Recording(NamedTuple):
    target: Target
    launches: list[Launch]


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(target: Target) -> Iterator[list[Launch]]:
    """Launches inside are appended to the list that this yields, as for `target`, and not run."""
    token = _recording.set(_Recording(target, []))
    try:
        active = _recording.get()
        assert active is not None
        yield active.launches
    finally:
        _recording.reset(token)


def launch_backend() -> Backend:
    """The backend that a launch from here is for."""
    active = _recording.get()
    return current_backend() if active is None else active.target.backend


def launch_arch(device: torch.device) -> int | str:
    """The architecture that a launch on `device` is for, as `Target.arch`; 0 in the interpreter."""
    active = _recording.get()
    if active is not None:
        return active.target.arch
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return 10 * properties.major + properties.minor


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Mapping[str, Tensor | int | float | None],
    constants: Mapping[str, Any],
    warps: Warps,
) -> None:
    """Run `kernel` on the device of its first tensor; nothing where the grid is empty."""
    if 0 in grid:
        return
    active = _recording.get()
    if active is not None:
        active.launches.append(Launch(kernel, grid, dict(args), dict(constants), warps))
        return
    device = next(a.device for a in args.values() if isinstance(a, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**args, **constants, **warps._asdict())
