"""The tensors of a checkpoint under examination: those whose files could be read, by name.

Unlike `calib.shards.Shards` it is made from headers that are there, not from what ought to be, and
a tensor's bytes are read into memory of their own, so that what has been looked at is given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...calib.safetensors_file import Header, StoredTensor
from ...calib.shards import TensorInfo
from ...kernels.errors import UserError


class StoredTensors:
    """A TensorSource (calib/shards.py) over the headers of some files of `folder`."""

    def __init__(self, folder: Path, headers: Mapping[str, Header]) -> None:
        """headers: file name -> its header. Of a tensor in several files the first is taken."""
        self.folder = folder
        self._stored: dict[str, tuple[str, StoredTensor]] = {}
        for file, header in headers.items():
            for name, t in header.tensors.items():
                self._stored.setdefault(name, (file, t))
        self.info: dict[str, TensorInfo] = {
            name: TensorInfo(file, t.torch_shape, t.torch_dtype)
            for name, (file, t) in self._stored.items()
        }

    def names(self) -> list[str]:
        return list(self.info)

    def __contains__(self, name: str) -> bool:
        return name in self.info

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """The tensor `name`, in its stored dtype."""
        if name not in self._stored:
            raise UserError(f"{self.folder} holds no tensor named '{name}'")
        file, t = self._stored[name]
        data = np.fromfile(self.folder / file, np.uint8, t.nbytes, offset=t.start)
        if len(data) < t.nbytes:
            raise UserError(f"{self.folder / file} became shorter while it was read")
        flat = torch.from_numpy(data).view(t.torch_dtype)
        return flat.view(t.torch_shape).to(device)

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Entries `start` to `stop` of the first axis of the tensor `name`."""
        return self.get(name)[start:stop]

    def without(self, names: set[str]) -> StoredTensors:
        """The same but for the tensors `names`."""
        other = StoredTensors(self.folder, {})
        other._stored = {n: s for n, s in self._stored.items() if n not in names}
        other.info = {n: i for n, i in self.info.items() if n not in names}
        return other

    def close(self) -> None:
        """Nothing is held open."""
