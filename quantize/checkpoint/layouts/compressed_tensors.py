"""compressed-tensors, the native layout: what it stores is in ../compress.py, its config in
../ct_config.py."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from ....calib.shards import TensorSource
from ....kernels.errors import UserError
from ...quantized import Quantized
from ...spec import Group, LayerScheme, QuantSpec
from ..checks import Get
from ..compress import (
    compress,
    compress_input_scale,
    decompress,
    decompress_input_scale,
    input_scale_name,
    read_shape,
)
from ..ct_config import (
    config_from_schemes,
    scheme_for_module,
    schemes_from_config,
)
from .base import Layout, matrix_shape, modules_with


class CompressedTensors(Layout):
    """Every scheme that lowbit has; also several in one checkpoint (mixed-precision)."""

    name = "compressed-tensors"
    takes = "every scheme"
    any_scale_dtype = True
    g_idx_leaf = "weight_g_idx"  # of files by which columns were once ordered
    scale_leaf = "weight_scale"
    leaves = frozenset({
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx", "weight_global_scale", "input_scale", "input_global_scale",
        "input_zero_point",
    })  # fmt: skip

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == "compressed-tensors"

    def schemes(
        self, quantization: Mapping[str, Any], source: TensorSource
    ) -> dict[str, LayerScheme]:
        groups = schemes_from_config(dict(quantization), source.folder)
        for key in ("transform_config", "sparsity_config"):
            _check_absent(key, quantization, source)
        modules = modules_with(self.scale_leaf, source)
        unscaled = set(modules_with("weight_packed", source)) - set(modules)
        if unscaled:
            raise UserError(
                f"{source.folder}: '{min(unscaled)}' has a weight_packed but no weight_scale: the "
                "checkpoint is damaged"
            )
        found = {m: scheme_for_module(m, groups) for m in modules}
        unclaimed = [m for m, s in found.items() if s is None]
        if unclaimed:
            raise UserError(
                f"{source.folder}: '{unclaimed[0]}' has a weight_scale but no config_group of "
                "config.json targets it"
            )
        return {m: s for m, s in found.items() if s is not None}

    def refusal(self, scheme: LayerScheme, shape: tuple[int, int] | None = None) -> str | None:
        if shape is None:
            return None
        match scheme.weights.granularity:
            case Group(size) if shape[1] % size:
                return f"groups of {size} do not divide {shape[1]} columns"
        return None

    def compress(self, module: str, q: Quantized, scheme: LayerScheme) -> dict[str, Tensor]:
        if q.g_idx is not None:
            raise UserError(
                f"'{module}' has columns in no order of groups (g_idx), which compressed-tensors "
                "no longer stores; choose gptq or gptq_v2"
            )
        return compress(module, q, scheme)

    def decompress(
        self, module: str, names: Container[str], get: Get, spec: QuantSpec
    ) -> Quantized:
        return decompress(module, names, get, spec)

    def shape(self, module: str, spec: QuantSpec, source: TensorSource) -> tuple[int, int]:
        if f"{module}.weight" in source:
            return matrix_shape(f"{module}.weight", source)
        if spec.type == "float":
            rows, halved = matrix_shape(f"{module}.weight_packed", source)
            return rows, 2 * halved  # two of 4 bits to a byte
        if f"{module}.weight_shape" not in source:
            raise UserError(
                f"'{module}' has neither a weight nor a weight_shape: damaged checkpoint"
            )
        return read_shape(module, source.get)

    def config(
        self,
        schemes: Mapping[str, LayerScheme],
        ignore: list[str],
        version: str,
        act_order: bool = False,
    ) -> dict[str, Any]:
        assert not act_order, "refused by compress"
        return config_from_schemes(dict(schemes), ignore, version)

    def compress_input_scale(
        self, module: str, spec: QuantSpec, scale: Tensor
    ) -> dict[str, Tensor]:
        return compress_input_scale(module, spec, scale)

    def decompress_input_scale(
        self, module: str, names: Container[str], get: Get, spec: QuantSpec
    ) -> Tensor | None:
        return decompress_input_scale(module, names, get, spec)

    def input_scale_leaf(self, spec: QuantSpec) -> str | None:
        return input_scale_name(spec)


def _check_absent(key: str, quantization: Mapping[str, Any], source: TensorSource) -> None:
    """UserError where weights are not what they are worth: rotated at run time, or sparse."""
    value = quantization.get(key)
    if value and value != {"format": "dense"}:
        what = {"transform_config": "rotates at run time", "sparsity_config": "stores sparse"}[key]
        raise UserError(
            f"{source.folder} {what} ({key} of config.json), which lowbit does not read; give the "
            "original model to `quantize run`"
        )
