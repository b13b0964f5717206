"""What goes between the host and the device in a step: one copy there, one copy back.

A copy of its own for every list of numbers takes longer than a decode layer of a small model, and
out of memory that is not pinned it makes the host wait for the device. So the numbers of a step are
laid out in one piece of pinned memory, and what the host wants to know of a step comes back in one
piece, too. torch's allocator of pinned memory hands none out again before the copies that were
asked of it are done. On a CPU nothing is copied: the host's memory is the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels are compiled for where a tensor begins


class Part(NamedTuple):
    """A tensor in a layout."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """Where tensors lie in one piece of memory of `nbytes` bytes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._places: list[tuple[Part, int, int]] = []
        self.nbytes = 0
        for part in parts:
            size = math.prod(part.shape) * part.dtype.itemsize
            self._places.append((part, self.nbytes, self.nbytes + size))
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in uint8 [at least nbytes]."""
        made = []
        for (shape, dtype), begin, end in self._places:
            flat = memory[begin:end].view(dtype)
            made.append(flat if len(shape) == 1 else flat.view(shape))
        return made


class Outgoing:
    """Numbers for the device: `arrays` are filled in, then `send` copies them all at once."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._memory = torch.empty(
            layout.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self._tensors = layout.views(self._memory)
        self.arrays: list[np.ndarray] = [tensor.numpy() for tensor in self._tensors]

    def send(self, memory: Tensor | None = None) -> list[Tensor]:
        """The tensors on the device, in `memory` (uint8 [at least nbytes]) where it is given.
        Nothing waits for the copy but what runs on the device after it."""
        if memory is not None:
            target = memory[: self._layout.nbytes]
            target.copy_(self._memory, non_blocking=True)
            return self._layout.views(target)
        if self._device.type == "cpu":
            return self._tensors
        return self._layout.views(self._memory.to(self._device, non_blocking=True))


class Incoming:
    """Tensors of a device on their way to the host: the copy is asked for at once, and nothing
    waits for it before `read`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._arrived: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type != "cuda":
            return
        layout, packed = pack(tensors)
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
        memory.copy_(packed, non_blocking=True)
        self._tensors = layout.views(memory)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(packed.device))

    def read(self) -> list[list[Any]]:
        """The numbers of each tensor. This is where the host waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.tolist() for tensor in self._tensors]


def pack(tensors: Sequence[Tensor]) -> tuple[Layout, Tensor]:
    """Tensors of one device as uint8 [layout.nbytes] there, one after the other."""
    layout = Layout([Part(tuple(t.shape), t.dtype) for t in tensors])
    packed = torch.empty(layout.nbytes, dtype=torch.uint8, device=tensors[0].device)
    for place, tensor in zip(layout.views(packed), tensors, strict=True):
        place.copy_(tensor)
    return layout, packed


def on_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a list of numbers, as torch.tensor makes it, without waiting for the device."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, without waiting for it."""
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
