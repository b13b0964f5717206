"""Experts' tensors between the two forms that checkpoints have them in: one a linear, and fused.

A fused parameter holds a layer's experts in its first dimension. An expert's slice of gate_up_proj
is the gate's and the up projection's rows, one after the other or interleaved; weights may be
stored as [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..kernels.names import names_in_model
from .experts import SplitExperts, split_modules
from .shards import TensorInfo, TensorSource


class FusedPart(NamedTuple):
    """Where a linear's weight or bias lies in an expert's slice of a fused parameter.

    linear, leaf: names of the linear and of its parameter. rows: of the slice, once its weight is
    [out, in]. transposed: whether it is stored as [in, out].
    """

    linear: str
    leaf: str
    rows: slice
    transposed: bool

    def take(self, stored: Tensor) -> Tensor:
        """The part of `stored`, one expert's slice."""
        return (stored.T if self.transposed else stored)[self.rows].contiguous()

    def put(self, stored: Tensor, value: Tensor) -> None:
        """Write the part into `stored`."""
        (stored.T if self.transposed else stored)[self.rows] = value


def fused_parameters(experts: SplitExperts) -> dict[str, list[FusedPart]]:
    """The fused parameters that `experts` replaces, by name, each with its parts."""
    names, gated = experts.names, experts.names.gate is not None
    if experts.concatenated:
        selections = [slice(0, experts.inner_features), slice(experts.inner_features, None)]
    else:
        selections = [slice(0, None, 2), slice(1, None, 2)]
    linears = {
        "gate_up_proj" if gated else "up_proj": list(
            zip(names.inner, selections if gated else [slice(None)], strict=True)
        ),
        "down_proj": [(names.down, slice(None))],
    }
    leaves = [("weight", "", experts.transposed)]
    if experts.has_bias:
        leaves.append(("bias", "_bias", False))
    return {
        parameter + suffix: [FusedPart(linear, leaf, rows, transposed) for linear, rows in parts]
        for leaf, suffix, transposed in leaves
        for parameter, parts in linears.items()
    }


def by_expert(model: Any, source: TensorSource) -> TensorSource:
    """`source` with every fused tensor of `model`'s split experts as one tensor a linear.

    It is `source` itself where the checkpoint holds them that way. UserError when a fused tensor
    has another shape than the model's.
    """
    fused = {
        f"{path}.{parameter}": (path, experts, parts)
        for path, experts in split_modules(model).items()
        for parameter, parts in fused_parameters(experts).items()
    }
    names = names_in_model(model, source.names()) if fused else {}
    found = {stored: fused[name] for stored, name in names.items() if name in fused}
    return _ByExpert(source, found) if found else source


class _ByExpert:
    """A source that hands out the parts of fused tensors in their place."""

    def __init__(
        self, source: TensorSource, fused: dict[str, tuple[str, SplitExperts, list[FusedPart]]]
    ) -> None:
        """fused: stored name -> path of the experts, the experts, and the tensor's parts."""
        self._source = source
        self._slices: dict[str, tuple[str, int, FusedPart]] = {}
        self.info: dict[str, TensorInfo] = {}
        for stored, info in source.info.items():
            if stored not in fused:
                self.info[stored] = info
                continue
            path, experts, parts = fused[stored]
            for expert in range(experts.num_experts):
                for part in parts:
                    name = f"{path}.{expert}.{part.linear}.{part.leaf}"
                    linear = experts.linears(expert)[part.linear]
                    shape = tuple(getattr(linear, part.leaf).shape)
                    self._check_shape(stored, info, experts.num_experts, parts, shape)
                    self._slices[name] = (stored, expert, part)
                    self.info[name] = TensorInfo(info.file, shape, info.dtype)

    @property
    def folder(self) -> Path:
        return self._source.folder

    def names(self) -> list[str]:
        return list(self.info)

    def __contains__(self, name: str) -> bool:
        return name in self.info

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        if name not in self._slices:
            return self._source.get(name, device)
        stored, expert, part = self._slices[name]
        return part.take(self._source.get(stored)[expert]).to(device)

    def close(self) -> None:
        self._source.close()

    def _check_shape(
        self,
        stored: str,
        info: TensorInfo,
        num_experts: int,
        parts: list[FusedPart],
        shape: tuple[int, ...],
    ) -> None:
        whole = (len(parts) * shape[0], *shape[1:])
        expected = (num_experts, *(reversed(whole) if parts[0].transposed else whole))
        if info.shape != expected:
            raise UserError(
                f"'{stored}' has shape {info.shape} in {self.folder}, but config.json asks for "
                f"{expected}"
            )


def fuse_experts(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` (stored name -> value) with those of split experts fused, under the names that
    transformers' own model of this class has for them; the inverse of `by_expert`.

    model: with split experts. UserError when an expert's tensor is missing.
    """
    stored_names = {name: stored for stored, name in names_in_model(model, tensors).items()}
    out = dict(tensors)
    for path, experts in split_modules(model).items():
        for parameter, parts in fused_parameters(experts).items():
            named = [
                (expert, part, f"{path}.{expert}.{part.linear}.{part.leaf}")
                for expert in range(experts.num_experts)
                for part in parts
            ]
            missing = [name for _, _, name in named if name not in stored_names]
            if missing:
                raise UserError(f"the checkpoint holds no tensor for '{missing[0]}'")
            first = tensors[stored_names[named[0][2]]]
            whole = (len(parts) * first.shape[0], *first.shape[1:])
            shape = tuple(reversed(whole)) if parts[0].transposed else whole
            fused = first.new_empty(experts.num_experts, *shape)
            for expert, part, name in named:
                part.put(fused[expert], out.pop(stored_names[name]))
            out[f"{path}.{parameter}"] = fused
    return out
