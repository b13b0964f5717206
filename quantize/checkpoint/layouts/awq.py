"""AWQ's gemm layout, as AutoAWQ writes it and vLLM, GPTQModel and transformers read it.

A linear of 4-bit codes with zero-points is stored as qweight int32 [in, out / 8], qzeros int32
[groups, out / 8] and scales float16 [groups, out]. Eight outputs share a word; nibble i, from the
low bits up, holds the output ORDER[i] of the eight. A value is (code - zero) * scale. Symmetric
linears are stored with the zero-point 8 written out.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from ....calib.shards import TensorSource
from ....kernels.errors import UserError
from ....kernels.packing import pack_bits, unpack_bits
from ...quantized import Quantized
from ...spec import Channel, Granularity, Group, LayerScheme, QuantSpec
from ..checks import Get, checked, read_float_scale, read_matrix
from .auto_round import published
from .base import Layout, matrix_shape, modules_with

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLACE = tuple(ORDER.index(i) for i in range(8))  # where each of the eight outputs lies


class AWQ(Layout):
    """4-bit weights with zero-points, of one group size."""

    name = "awq"
    takes = "W4A16_ASYM or W4A16"
    by_rows = False
    scale_leaf = "scales"
    leaves = frozenset({"qweight", "qzeros", "scales"})

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        return published(quantization).get("quant_method") == "awq"

    def schemes(
        self, quantization: Mapping[str, Any], source: TensorSource
    ) -> dict[str, LayerScheme]:
        quantization = published(quantization)
        try:
            version = str(quantization.get("version") or quantization.get("format") or "gemm")
            bits, size = int(quantization["bits"]), int(quantization["group_size"])
        except (ArithmeticError, KeyError, TypeError, ValueError) as e:
            raise UserError(
                f"{source.folder}: the quantization_config of config.json is not that of an AWQ "
                f"checkpoint ({type(e).__name__}: {e}); download it again"
            ) from e
        if version.lower() != "gemm" or bits != 4:
            raise UserError(
                f"{source.folder}: AWQ's version '{version}' of {bits} bits; lowbit reads gemm of 4"
            )
        granularity: Granularity = Channel() if size == -1 else Group(size)
        scheme = LayerScheme(QuantSpec(4, "int", granularity, symmetric=False))
        return dict.fromkeys(modules_with("qweight", source), scheme)

    def refusal(self, scheme: LayerScheme, shape: tuple[int, int] | None = None) -> str | None:
        spec = scheme.weights
        if scheme.input_activations is not None:
            return "awq stores weights alone, not how inputs are quantized"
        if spec.type != "int" or spec.num_bits != 4:
            return "awq holds whole numbers of 4 bits"
        if not isinstance(spec.granularity, Channel | Group):
            return f"awq holds scales of groups or channels, not {spec.granularity}"
        if shape is None:
            return None
        if shape[0] % 8:
            return f"awq packs 8 rows in a word, which {shape[0]} rows do not fill"
        match spec.granularity:
            case Group(size) if shape[1] % size:
                return f"groups of {size} do not divide {shape[1]} columns"
        return None

    def refusal_together(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        sizes = {str(s.weights.granularity) for s in schemes.values()}
        if len(sizes) > 1:
            return f"awq has one group size for all linears, not {', '.join(sorted(sizes))}"
        return None

    def compress(self, module: str, q: Quantized, scheme: LayerScheme) -> dict[str, Tensor]:
        assert scheme.weights == q.spec, (scheme, q.spec)
        if q.g_idx is not None:
            raise UserError(
                f"'{module}' has columns in no order of groups (g_idx), which awq does not store; "
                "choose gptq or gptq_v2"
            )
        zeros = q.zero_point
        if zeros is None:
            zeros = torch.zeros(q.scale.shape, dtype=torch.int8, device=q.scale.device)
        tensors = {
            "qweight": pack_interleaved(q.codes.T),
            "qzeros": pack_interleaved(zeros.T),
            "scales": q.scale.T.contiguous(),
        }
        return {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}

    def decompress(
        self, module: str, names: Container[str], get: Get, spec: QuantSpec
    ) -> Quantized:
        codes = unpack_interleaved(read_matrix(get, f"{module}.qweight", torch.int32)).T
        zeros = unpack_interleaved(read_matrix(get, f"{module}.qzeros", torch.int32)).T
        scale = read_float_scale(get, f"{module}.scales").T.contiguous()
        q = Quantized(codes.contiguous(), scale, zeros.contiguous(), spec)
        return checked(module, q, "scales", "qzeros")

    def shape(self, module: str, spec: QuantSpec, source: TensorSource) -> tuple[int, int]:
        columns, words = matrix_shape(f"{module}.qweight", source)
        return 8 * words, columns

    def config(
        self,
        schemes: Mapping[str, LayerScheme],
        ignore: list[str],
        version: str,
        act_order: bool = False,
    ) -> dict[str, Any]:
        assert not act_order, "refused by compress"
        match next(iter(schemes.values())).weights.granularity:
            case Group(size):
                group_size = size
            case _:
                group_size = -1
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": sorted(ignore),
            "meta": {"quantizer": [f"lowbit:{version}"]},
        }

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float16


def pack_interleaved(codes: Tensor) -> Tensor:
    """Signed 4-bit codes int8 [rows, n], n a multiple of 8, to int32 words [rows, n / 8]."""
    eights = codes.reshape(len(codes), -1, 8)
    return pack_bits(eights[..., list(ORDER)].flatten(1), 4)


def unpack_interleaved(words: Tensor) -> Tensor:
    """int32 words [rows, n / 8] to signed 4-bit codes int8 [rows, n]."""
    rows, count = words.shape
    eights = unpack_bits(words.contiguous(), 4, 8 * count).view(rows, count, 8)
    return eights[..., list(PLACE)].flatten(1)
