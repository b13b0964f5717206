"""A folder of safetensors shards read as one flat name -> tensor table.

Headers are read and checked (safetensors_file.py) when the folder is opened, tensors one at a time
when asked for, so the memory that a reader needs is that of the tensor in hand. Pickled weights are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..kernels.errors import UserError
from .safe_files import INDEX as INDEX_LIMITS
from .safe_files import checked_path, is_plain_name, read_json_object
from .safetensors_file import read_header

INDEX = "model.safetensors.index.json"
MAPPED_BYTES = 1 << 28  # what is read before file maps, which count as resident memory, are dropped


class TensorInfo(NamedTuple):
    """Where a tensor lies and what it is, without its data."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for d in self.shape:
            n *= d
        return n


class TensorSource(Protocol):
    """Named tensors of a model folder, as they are stored (`Shards`) or made from those on the way.

    `info` says how each is stored in the folder, whatever the dtype that `get` hands out; a tensor
    that is made and has no stored twin takes the dtype that it is to be written in.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def info(self) -> Mapping[str, TensorInfo]: ...

    def names(self) -> list[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor: ...

    def close(self) -> None: ...


class Shards:
    """The tensors of a model folder: `names()`, `info[name]`, `get(name)`.

    Raises UserError for a missing folder, pickled weights only, an index that names an absent file
    or tensor, and a truncated or damaged shard.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.info: dict[str, TensorInfo] = {}
        self._handles: dict[str, Any] = {}
        self._read = 0  # bytes of tensors read from the present maps
        for file in self._files():
            self._read_header(file)
        self._check_index()
        if not self.info:
            raise UserError(f"{self.folder} holds no tensors; download the model again")

    def names(self) -> list[str]:
        return list(self.info)

    def __contains__(self, name: str) -> bool:
        return name in self.info

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """The tensor `name`, in its stored dtype."""
        tensor = self._map_of(name).get_tensor(name)
        self._read += tensor.nbytes
        return tensor.to(device)

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Entries `start` to `stop` of the first axis of the tensor `name`, in its stored dtype.

        Only their pages are read.
        """
        rows = self._map_of(name).get_slice(name)[start:stop]
        self._read += rows.nbytes
        return rows

    def close(self) -> None:
        """Drop the open file maps (they count as resident memory once read)."""
        self._handles.clear()
        self._read = 0

    def _map_of(self, name: str) -> Any:
        """The open file of the tensor `name`. After every MAPPED_BYTES maps are dropped and made
        anew: what a reader has let go of is then not resident."""
        if name not in self.info:
            raise UserError(f"{self.folder} holds no tensor named '{name}'")
        if self._read > MAPPED_BYTES:
            self.close()
        return self._open(self.info[name].file)

    def _files(self) -> list[str]:
        if not self.folder.is_dir():
            what = "a file, not a model folder" if self.folder.exists() else "no such model folder"
            raise UserError(f"{what}: {self.folder}")
        if (self.folder / INDEX).exists():
            files = sorted(set(self._index().values()))
            absent = [f for f in files if is_plain_name(f) and not (self.folder / f).is_file()]
            if absent:
                raise UserError(
                    f"{INDEX} names {len(absent)} of {len(files)} files that are not in "
                    f"{self.folder}: {', '.join(absent[:3])}; download the model again"
                )
            return files
        files = sorted(f.name for f in self.folder.glob("*.safetensors"))
        if files:
            return files
        if list(self.folder.glob("*.bin")) or list(self.folder.glob("*.pt*")):
            raise UserError(
                f"{self.folder} holds pickled weights only (.bin); loading a pickle runs the code "
                "in it, so lowbit refuses: convert the model to safetensors first"
            )
        raise UserError(f"{self.folder} holds no .safetensors file")

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            files = read_json_object(path, INDEX_LIMITS).get("weight_map")
        except UserError as e:
            raise UserError(f"{path} is not a safetensors index: {e}") from e
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise UserError(
                f"{path} is not a safetensors index: weight_map must map names to files"
            )
        return files

    def _check_index(self) -> None:
        if (self.folder / INDEX).exists():
            absent = [n for n in self._index() if n not in self.info]
            if absent:
                raise UserError(
                    f"{INDEX} lists {len(absent)} tensors that the shards do not hold, first "
                    f"'{absent[0]}'; download the model again"
                )

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.folder / file, framework="pt")
            except FileNotFoundError as e:
                raise UserError(
                    f"{self.folder / file} is gone; put it back and give the same command again"
                ) from e
            except (SafetensorError, OSError) as e:
                raise UserError(
                    f"{self.folder / file} is truncated or damaged ({e}); download it again"
                ) from e
        return self._handles[file]

    def _read_header(self, file: str) -> None:
        for name, t in read_header(checked_path(self.folder, file)).tensors.items():
            if name in self.info:
                raise UserError(f"tensor '{name}' is in both {self.info[name].file} and {file}")
            self.info[name] = TensorInfo(file, t.torch_shape, t.torch_dtype)
