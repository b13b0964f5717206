"""Give a model on meta its weights: packed linears for the quantized ones, tensors for the rest.

Linears that read one input become one product (runtime/fused.py). Tensors are read, cast and put
in their place one at a time, so the dense model never exists twice, and a quantized linear never
exists dense at all. What the model needs and what the checkpoint holds must be the same set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..kernels.errors import UserError
from ..kernels.linear_ops import LinearProblem
from ..kernels.names import is_ignored, merges_on_loading, names_in_model
from ..quantize.checkpoint.ct_config import quantizes_outputs
from ..quantize.checkpoint.kv_config import scale_names
from ..quantize.checkpoint.load import Checkpoint
from ..quantize.linear_problem import linear_problem
from ..quantize.spec import LayerScheme
from .fused import SHARED_INPUTS, Fusion, LinearPart, can_join, fusions, join_biases, put_parts
from .linear import LinearReport, PackedLinear
from .models.families import FAMILIES, takes_tape


class Filler:
    """The tensors of `checkpoint` on their way into `model`, whose parameters are on meta."""

    def __init__(self, checkpoint: Checkpoint, model: Any, batch_invariant: bool = False) -> None:
        self.checkpoint, self.model, self._invariant = checkpoint, model, batch_invariant
        self.folder = checkpoint.folder
        names = names_in_model(model, checkpoint.shards.names())
        self._stored = {name: stored for stored, name in names.items()}
        self._unused = set(checkpoint.shards.names())
        self._unused.difference_update(scale_names(self._unused))  # the cache's: loader.py

    def problems(self, device: torch.device) -> Iterable[LinearProblem]:
        """The kernel question of every quantized linear, for float32 activations."""
        if quantizes_outputs(self.checkpoint.config.get("quantization_config") or {}):
            raise UserError(f"{self.folder} quantizes output activations, which is not run")
        for module, _, scheme in self._quantized():
            linear = self._linear(module)
            shape = (linear.out_features, linear.in_features)
            problem = linear_problem(module, scheme, shape, torch.float32, device)
            yield problem._replace(taped=self._taped(device))

    def fill(
        self, device: torch.device, dtype: torch.dtype, kernel: str | None
    ) -> list[LinearReport]:
        """Put every tensor in its place; the reports of the packed linears.

        kernel: the name of the one that all packed linears must run on.
        """
        stored = {module: name for module, name, _ in self._quantized()}
        planned = fusions(stored, lambda parts: self._may_join([stored[p] for p in parts], parts))
        reports: list[LinearReport] = []
        for fusion in tqdm(planned, desc="load linears", delay=2, disable=None):
            names = [stored[part] for part in fusion.parts]
            reports += self._pack(fusion, names, device, dtype, kernel)
        self._fill_parameters(device, dtype)
        self._join_biases(planned)
        self._fill_buffers(device)
        self._check_unused()
        return reports

    def _taped(self, device: torch.device) -> bool:
        """Whether the model's layers will run as a tape."""
        return device.type == "cpu" and takes_tape(self.model.config)

    def _quantized(self) -> Iterable[tuple[str, str, LayerScheme]]:
        """Name in the model, name in the checkpoint and scheme of every quantized linear."""
        layout = self.checkpoint.layout
        scale = "" if layout is None else f".{layout.scale_leaf}"
        in_model = {s.removesuffix(scale): n.removesuffix(scale) for n, s in self._stored.items()}
        for stored, scheme in self.checkpoint.schemes.items():
            yield in_model[stored], stored, scheme

    def _linear(self, module: str) -> nn.Linear:
        try:
            linear = self.model.get_submodule(module)
        except AttributeError as e:
            raise UserError(
                f"{self.folder} holds a quantized '{module}', which the model does not have"
            ) from e
        if not isinstance(linear, nn.Linear):
            raise UserError(f"'{module}' is quantized, but is a {type(linear).__name__}")
        return linear

    def _may_join(self, stored: Sequence[str], modules: Sequence[str]) -> bool:
        """Whether quantized linears may be one product, as far as is known without their codes."""
        if self.model.config.model_type not in FAMILIES.keys() | SHARED_INPUTS:
            return False
        schemes = [self.checkpoint.schemes[name] for name in stored]
        linears = [self._linear(module) for module in modules]
        return (
            all(scheme == schemes[0] for scheme in schemes)
            and len({linear.in_features for linear in linears}) == 1
            and len({linear.bias is None for linear in linears}) == 1
        )

    def _pack(
        self,
        fusion: Fusion,
        stored: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        kernel: str | None,
    ) -> list[LinearReport]:
        """Pack the linears of `fusion`, whose names in the checkpoint are `stored`, as one where
        what they hold allows it; their reports."""
        weights = [self.checkpoint.quantized(name, device) for name in stored]
        scales = [self.checkpoint.input_scale(name) for name in stored]
        if not can_join(weights, scales):
            apart = zip(fusion.parts, stored, strict=True)
            each = [self._pack(Fusion(p, (p,)), [s], device, dtype, kernel) for p, s in apart]
            return [report for reports in each for report in reports]
        linears = [self._linear(part) for part in fusion.parts]
        for part, linear, weight in zip(fusion.parts, linears, weights, strict=True):
            self._check_shape(f"{part}.weight", weight.codes, linear.weight)
        # off the file map
        scale = None if scales[0] is None else scales[0].to(device, copy=True)
        alone, scheme = len(linears) == 1, self.checkpoint.schemes[stored[0]]
        bias = linears[0].bias if alone else None
        packed = PackedLinear(
            fusion.module, weights, scheme, bias, dtype, device, kernel, scale, self._invariant,
            self._taped(device),
        )  # fmt: skip
        parent, _, leaf = fusion.module.rpartition(".")
        owner = self.model.get_submodule(parent)
        setattr(owner, leaf, packed)
        if not alone:
            put_parts(owner, packed, [part.rpartition(".")[2] for part in fusion.parts])
        for name in stored:
            self._unused.difference_update(self.checkpoint.stored_names(name))
        return packed.reports(fusion.parts, [len(w.codes) for w in weights])

    def _join_biases(self, planned: Iterable[Fusion]) -> None:
        for fusion in planned:
            parts = [self.model.get_submodule(part) for part in fusion.parts]
            if len(parts) > 1 and isinstance(parts[0], LinearPart):
                join_biases(self.model.get_submodule(fusion.module), parts)

    def _fill_parameters(self, device: torch.device, dtype: torch.dtype) -> None:
        """Read every parameter; those that the model ties share one tensor."""
        tied: dict[int, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(param), []).append(name)
        for names in tqdm(tied.values(), desc="load tensors", delay=2, disable=None):
            found = {n: self._read(n) for n in names if n in self._stored}
            if not found:
                raise self._missing(names[0])
            first = next(iter(found.values()))
            if all(torch.equal(t, first) for t in found.values()):
                found = dict.fromkeys(names, first)
            elif len(found) < len(names):
                raise UserError(
                    f"{self.folder}: config.json ties {', '.join(names)}, but the tensors "
                    f"{', '.join(found)} differ"
                )
            self._assign(found, device, dtype)

    def _missing(self, name: str) -> UserError:
        message = f"{self.folder} holds no tensor for the parameter '{name}'"
        if merges_on_loading(self.model):
            message += (
                f" ({type(self.model).__name__} merges stored tensors on loading, in a way "
                "that lowbit does not know)"
            )
        return UserError(message)

    def _assign(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Make `tensors` the parameters of these names; names with the same tensor share one."""
        made: dict[int, nn.Parameter] = {}
        for name, tensor in tensors.items():
            owner, leaf = self._owner(name)
            self._check_shape(name, tensor, getattr(owner, leaf))
            if not tensor.is_floating_point():
                raise UserError(f"'{name}' is stored as {tensor.dtype} with no scale beside it")
            if id(tensor) not in made:
                value = tensor.to(device, dtype, copy=True)  # off the file map
                made[id(tensor)] = nn.Parameter(value, requires_grad=False)
            owner._parameters[leaf] = made[id(tensor)]

    def _fill_buffers(self, device: torch.device) -> None:
        """Move all buffers to the device, and read those that the checkpoint holds."""
        persistent = self.model.state_dict().keys()
        for name, buffer in list(self.model.named_buffers()):
            if name in persistent and name in self._stored:
                buffer = self._read(name).to(buffer.dtype, copy=True)
            owner, leaf = self._owner(name)
            owner._buffers[leaf] = buffer.to(device)

    def _read(self, name: str) -> Tensor:
        stored = self._stored[name]
        self._unused.discard(stored)
        return self.checkpoint.shards.get(stored)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that a parameter or buffer belongs to, and its name there."""
        parent, _, leaf = name.rpartition(".")
        return self.model.get_submodule(parent), leaf

    def _check_shape(self, name: str, tensor: Tensor, expected: Tensor) -> None:
        if tensor.shape != expected.shape:
            raise UserError(
                f"'{name}' has shape {tuple(tensor.shape)} in {self.folder}, but config.json asks "
                f"for {tuple(expected.shape)}"
            )

    def _check_unused(self) -> None:
        """UserError when the checkpoint holds tensors that the model has no place for."""
        unexpected = [n for n in self._unused if not is_ignored(self.model, n)]
        if unexpected:
            raise UserError(
                f"{self.folder} holds {len(unexpected)} tensors that its model "
                f"({type(self.model).__name__}) has no place for, first '{min(unexpected)}'"
            )
