"""What a checkpoint layout is: how quantized linears are stored in tensors and told in config.json.

One subclass a layout, without state, so that whoever reads or writes a checkpoint has no case for
any of them. A layout holds a quantized linear in tensors named MODULE.LEAF; everything else in the
folder is stored as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....calib.shards import TensorSource
from ....kernels.errors import UserError
from ...quantized import Quantized, elements
from ...ranges import scale_store
from ...spec import LayerScheme, QuantSpec
from ..checks import Get


class Stored(NamedTuple):
    """What one tensor of a quantized linear has to be.

    dtype: None where any float that holds scales will do. optional: a reader can do without it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    optional: bool = False


class Layout(ABC):
    """A way to store quantized linears.

    name: what --format and --to call it. scale_leaf: of the tensor that holds a linear's scales,
    which every quantized linear has. leaves: of all tensors that stand in place of its weight (and
    of its inputs' scales). optional_leaves: those of them that a reader can do without. g_idx_leaf:
    of the tensor that names each column's group, None where there is none; writes_g_idx: whether
    such columns are still written. takes: the schemes that it holds, for people. by_rows: whether a
    weight's rows (and their scales) follow each other in its tensors, so that it can be written
    piece by piece. any_scale_dtype: whether scales may be stored in any float.
    """

    name: str
    scale_leaf: str
    leaves: frozenset[str]
    optional_leaves: frozenset[str] = frozenset()
    g_idx_leaf: str | None = None
    writes_g_idx: bool = False
    takes: str
    by_rows: bool = True
    any_scale_dtype: bool = False

    @abstractmethod
    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` says that the checkpoint is of this layout."""

    @abstractmethod
    def schemes(
        self, quantization: Mapping[str, Any], source: TensorSource
    ) -> dict[str, LayerScheme]:
        """Name -> scheme of every quantized linear, from the config and the tensors' names.

        UserError where the two contradict each other or say what is not read.
        """

    @abstractmethod
    def refusal(self, scheme: LayerScheme, shape: tuple[int, int] | None = None) -> str | None:
        """Why the layout cannot hold a linear of `scheme`, None when it can.

        shape: [out, in] of its weight; None asks of the scheme alone.
        """

    def risk(self, scheme: LayerScheme) -> str | None:
        """What some weights of `scheme` come to that the layout cannot hold, although it holds
        others; None where there is no such thing."""
        return None

    def refusal_together(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        """Why the layout cannot hold these schemes in one checkpoint, None when it can."""
        return None

    @abstractmethod
    def compress(self, module: str, q: Quantized, scheme: LayerScheme) -> dict[str, Tensor]:
        """Tensors by name that store the quantized linear `module`; they may be on meta.

        UserError for values that the layout cannot hold.
        """

    @abstractmethod
    def decompress(
        self, module: str, names: Container[str], get: Get, spec: QuantSpec
    ) -> Quantized:
        """The quantized linear `module` from its stored tensors; the inverse of `compress`.

        names: tensor names that exist; get: a tensor by name. UserError when shapes or dtypes do
        not fit or a scale is not finite.
        """

    @abstractmethod
    def shape(self, module: str, spec: QuantSpec, source: TensorSource) -> tuple[int, int]:
        """[out, in] of the weight of a quantized linear, without reading its codes."""

    @abstractmethod
    def config(
        self,
        schemes: Mapping[str, LayerScheme],
        ignore: list[str],
        version: str,
        act_order: bool = False,
    ) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint whose quantized linears are `schemes`' keys.

        ignore: the linears left alone. version: lowbit's. act_order: whether some columns lie in
        no order of groups.
        """

    def side_files(self, quantization: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """JSON files beside config.json that this layout's readers look for."""
        return {}

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """What scales are stored in where the scheme leaves that to the model."""
        return model_dtype

    def compress_input_scale(
        self, module: str, spec: QuantSpec, scale: Tensor
    ) -> dict[str, Tensor]:
        """The scale of the inputs of `module`, as `input_scale_of_peak` gives it, by its name."""
        raise AssertionError(f"{self.name} stores no scales of inputs")

    def decompress_input_scale(
        self, module: str, names: Container[str], get: Get, spec: QuantSpec
    ) -> Tensor | None:
        """The scale [1] of the inputs of `module`; None where it is made for each input."""
        return None

    def input_scale_leaf(self, spec: QuantSpec) -> str | None:
        """What the scale of a linear's inputs is stored as; None where none is."""
        return None

    def relabelled(
        self, schemes: Mapping[str, LayerScheme], source: TensorSource
    ) -> tuple[Layout, str | None]:
        """The layout that the tensors are of, and a warning where the config names another."""
        return self, None

    def tensors(
        self,
        module: str,
        scheme: LayerScheme,
        shape: tuple[int, int],
        model_dtype: torch.dtype | None = None,
    ) -> dict[str, Stored]:
        """What has to be stored for the linear `module` with a weight [out, in] of `shape`.

        model_dtype: of the model that is written; None: what a reader takes, scales of any float.
        """
        empty = empty_quantized(scheme.weights, shape, self.scale_dtype(model_dtype or torch.half))
        made = {
            name: Stored(tuple(tensor.shape), tensor.dtype, _leaf(name) in self.optional_leaves)
            for name, tensor in self.compress(module, empty, scheme).items()
        }
        any_float: set[str | None] = set()
        if scheme.weights.scale_dtype == "model":
            any_float.add(self.scale_leaf)
        inputs = scheme.input_activations
        leaf = None if inputs is None else self.input_scale_leaf(inputs)
        if inputs is not None and leaf is not None:
            whole = inputs.scale_dtype == "e4m3"
            made[f"{module}.{leaf}"] = Stored((1,), torch.float32 if whole else empty.scale.dtype)
            any_float.add(leaf)
        if model_dtype is not None:
            return made
        return {
            name: stored._replace(dtype=None) if _leaf(name) in any_float else stored
            for name, stored in made.items()
        }


def empty_quantized(spec: QuantSpec, shape: tuple[int, int], model_dtype: torch.dtype) -> Quantized:
    """A quantized weight on meta: what is stored of it has the shapes and dtypes of a real one."""
    probe = scale_store(torch.ones(1, 1), spec, model_dtype)

    def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return Quantized(
        meta(shape, elements(spec).dtype),
        meta(spec.scale_shape(*shape), probe.dtype),
        None if spec.symmetric else meta(spec.scale_shape(*shape), torch.int8),
        spec,
        None if probe.global_scale is None else meta((1,), torch.float32),
    )


def modules_with(leaf: str, source: TensorSource) -> list[str]:
    """Names of the modules that have a tensor called `leaf`, in the source's order."""
    ending = f".{leaf}"
    return [n.removesuffix(ending) for n in source.names() if n.endswith(ending)]


def matrix_shape(name: str, source: TensorSource) -> tuple[int, int]:
    """The shape of the tensor `name`; UserError when it is missing or has not two axes."""
    info = source.info.get(name)
    if info is None or len(info.shape) != 2:
        found = "is missing" if info is None else f"has shape {info.shape}, not two axes"
        raise UserError(f"{name} {found}: the checkpoint is damaged")
    return info.shape[0], info.shape[1]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
