"""Hugging Face's fine-grained FP8, the layout of DeepSeek's and Qwen's FP8 checkpoints.

A linear is stored as weight float8_e4m3fn [out, in] and weight_scale_inv float32 [ceil(out / m),
ceil(in / n)], a factor in spite of its name, for blocks of m x n. Inputs are quantized on the fly
in groups of n. Checkpoints with one scale for each weight, or with static scales of inputs, carry
the same quant_method; quantize/fp8_source.py reads them as the models that they stand for.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from ....calib.shards import TensorSource
from ....kernels.errors import UserError
from ...quantized import Quantized
from ...spec import Block, Group, LayerScheme, QuantSpec
from ..checks import Get, checked, read_float_scale, read_matrix
from .base import Layout, matrix_shape, modules_with


class HFFP8(Layout):
    """8-bit floats with scales of blocks, inputs quantized in groups as wide as these."""

    name = "fp8"
    takes = "FP8_BLOCK"
    scale_leaf = "weight_scale_inv"
    leaves = frozenset({"weight", "weight_scale_inv"})

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        return (
            quantization.get("quant_method") == "fp8"
            and bool(quantization.get("weight_block_size", (128, 128)))
            and quantization.get("activation_scheme", "dynamic") == "dynamic"
        )

    def schemes(
        self, quantization: Mapping[str, Any], source: TensorSource
    ) -> dict[str, LayerScheme]:
        size = quantization.get("weight_block_size", (128, 128))
        pair = isinstance(size, list | tuple) and len(size) == 2
        if not (pair and all(type(n) is int and n > 0 for n in size)):
            raise UserError(
                f"{source.folder}: weight_block_size of config.json must be two positive numbers, "
                f"got {size!r}"
            )
        rows, columns = size
        scheme = LayerScheme(
            QuantSpec(8, "float", Block(rows, columns)),
            QuantSpec(8, "float", Group(columns), dynamic=True),
        )
        return dict.fromkeys(modules_with(self.scale_leaf, source), scheme)

    def refusal(self, scheme: LayerScheme, shape: tuple[int, int] | None = None) -> str | None:
        spec, inputs = scheme.weights, scheme.input_activations
        if (spec.type, spec.num_bits) != ("float", 8) or spec.block is None:
            return "fp8 holds 8-bit floats with scales of blocks"
        if inputs != QuantSpec(8, "float", Group(spec.block[1]), dynamic=True):
            return f"fp8 quantizes inputs on the fly to 8-bit floats in groups of {spec.block[1]}"
        return None

    def refusal_together(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        sizes = {s.weights.block for s in schemes.values()}
        return f"fp8 has one block size for all linears, not {sizes}" if len(sizes) > 1 else None

    def compress(self, module: str, q: Quantized, scheme: LayerScheme) -> dict[str, Tensor]:
        assert scheme.weights == q.spec, (scheme, q.spec)
        return {
            f"{module}.weight": q.codes.contiguous(),
            f"{module}.weight_scale_inv": q.scale.contiguous(),
        }

    def decompress(
        self, module: str, names: Container[str], get: Get, spec: QuantSpec
    ) -> Quantized:
        codes = read_matrix(get, f"{module}.weight", torch.float8_e4m3fn)
        scale = read_float_scale(get, f"{module}.weight_scale_inv").float()
        return checked(module, Quantized(codes, scale, None, spec), self.scale_leaf, "")

    def shape(self, module: str, spec: QuantSpec, source: TensorSource) -> tuple[int, int]:
        return matrix_shape(f"{module}.weight", source)

    def config(
        self,
        schemes: Mapping[str, LayerScheme],
        ignore: list[str],
        version: str,
        act_order: bool = False,
    ) -> dict[str, Any]:
        assert not act_order, "columns of floats lie in order"
        block = next(iter(schemes.values())).weights.block
        assert block is not None, "refused"
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
            "modules_to_not_convert": sorted(ignore),
            "meta": {"quantizer": [f"lowbit:{version}"]},
        }

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float32
