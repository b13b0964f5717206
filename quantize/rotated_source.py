"""A model folder's tensors, rotated as they are read: the same interface as the folder's shards.

So the layer loop, the passes and the saver need no case for a rotated model, and no copy of it is
ever written or held.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calib.model import LayeredModel
from ..calib.shards import TensorInfo, TensorSource
from ..kernels.errors import UserError
from .passes.rotate import (
    residual_rotation,
    rotate_reader,
    rotate_value_inputs,
    rotate_value_outputs,
    rotate_writer,
    value_rotation,
)
from .passes.settings import RotateSettings
from .rotation_roles import Role, find_roles

WRITABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class RotatedSource:
    """`source` under R1 and R2. Changed tensors are handed out in float32, others as stored.

    changed: names of the tensors that differ from the stored ones, in the source's order, new ones
    (the head of a model that had it tied to the embedding) last. config_changes: what config.json
    must say differently. `info` gives the stored dtype of every tensor, which a changed one that
    stays unquantized is written in: the one it had, unless `stored` names another.

    Raises UserError, with the reason, for a model that the rotation cannot be fused into.
    """

    def __init__(
        self,
        source: TensorSource,
        model: LayeredModel,
        settings: RotateSettings,
        stored: torch.dtype | None = None,
    ) -> None:
        """model: the unrotated model of the same folder."""
        self.settings = settings
        self._source = source
        self._roles, self._gain_offset = find_roles(model, source, settings)
        hidden = model.config.get_text_config().hidden_size
        self.residual = residual_rotation(hidden, settings) if settings.r1 else None
        self._value_rotation = lru_cache(maxsize=2)(
            lambda size, layer: value_rotation(size, layer, settings)
        )
        made = {n: r.made_from for n, r in self._roles.items() if r.made_from is not None}
        self._info = {**source.info, **{n: source.info[m] for n, m in made.items()}}
        self.changed = tuple(n for n in self._info if n in self._roles)
        self.config_changes: Mapping[str, Any] = {"tie_word_embeddings": False} if made else {}
        self._check_dtypes()
        if stored is not None:
            changed = {n: self._info[n]._replace(dtype=stored) for n in self.changed}
            self._info = {**self._info, **changed}

    @property
    def folder(self) -> Path:
        return self._source.folder

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self._info

    def names(self) -> list[str]:
        return list(self._info)

    def __contains__(self, name: str) -> bool:
        return name in self._info

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """The tensor `name`: float32 where it is one of `changed`, else as it is stored."""
        role = self._roles.get(name)
        if role is None:
            return self._source.get(name, device)
        return self._rotated(self._source.get(role.made_from or name, device).float(), role)

    def close(self) -> None:
        self._source.close()

    @property
    def description(self) -> str:
        """What the rotations are made of."""
        parts = [] if self.residual is None else [f"R1 {self.residual}"]
        heads = next((r for r in self._roles.values() if r.values is not None), None)
        if heads is not None and heads.values is not None:
            parts.append(f"R2 {self._value_rotation(heads.values.dim, heads.layer)}")
        return f"rotated by {'; '.join(parts)} (seed {self.settings.seed})"

    def _rotated(self, tensor: Tensor, role: Role) -> Tensor:
        if role.neutral is not None:
            return torch.full_like(tensor, role.neutral)
        if role.reads:
            gain = None if role.gain is None else self._gain(role.gain, tensor.device)
            tensor = rotate_reader(tensor, gain, self.residual)
        if role.values is not None:
            rotation = self._value_rotation(role.values.dim, role.layer)
            tensor = rotate_value_outputs(tensor, role.values, rotation)
        if role.mixes_values is not None:
            rotation = self._value_rotation(role.mixes_values, role.layer)
            tensor = rotate_value_inputs(tensor, rotation)
        if role.writes:
            assert self.residual is not None
            tensor = rotate_writer(tensor, self.residual)
        return tensor

    def _gain(self, norm: str, device: torch.device) -> Tensor:
        return self._source.get(norm, device).float() + self._gain_offset

    def _check_dtypes(self) -> None:
        for name in self.changed:
            if self._info[name].dtype not in WRITABLE:
                raise UserError(
                    f"'{name}' is stored as {self._info[name].dtype}, so the model is quantized "
                    "already; rotate the original one"
                )
