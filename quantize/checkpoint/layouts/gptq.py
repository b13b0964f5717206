"""GPTQ's layout, versions 1 and 2: AutoGPTQ began it, GPTQModel, vLLM and transformers read it.

A linear of b bits is stored as

- qweight int32 [in * b / 32, out]: the codes of a column (an output) as a dense stream of b bits,
  lowest bits first, down the input axis;
- qzeros int32 [groups, out * b / 32]: the zero-points likewise along the output axis. Version 1
  stores them minus one, so a zero of 0 has no place in it;
- scales float16 [groups, out]; they may be negative (AutoRound's are);
- g_idx int32 [in]: the group of each input.

Symmetric linears have the zero-point 2^(b-1) written out. Version 2 files labelled 1 (and the
reverse) exist; for symmetric linears the zero-points themselves tell.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ....calib.shards import TensorSource
from ....kernels.errors import UserError
from ....kernels.packing import pack_bits, packed_words, unpack_bits
from ...quantized import Quantized, plain_g_idx
from ...spec import Channel, Group, LayerScheme, QuantSpec
from ..checks import Get, check_groups, checked, read_float_scale, read_g_idx, read_matrix
from .auto_round import published
from .base import Layout, matrix_shape, modules_with
from .gptq_config import gptq_config, read_schemes

BITS = (2, 3, 4, 8)
SAMPLED = 8  # modules whose zero-points are looked at to tell the version


class GPTQ(Layout):
    """One of the two versions, which differ in their zero-points alone."""

    by_rows = False
    g_idx_leaf = "g_idx"
    writes_g_idx = True
    scale_leaf = "scales"
    leaves = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    optional_leaves = frozenset({"g_idx"})

    def __init__(self, version: Literal[1, 2]) -> None:
        self.version = version
        self.name = "gptq" if version == 1 else "gptq_v2"
        offsets = "" if version == 1 else " (also with _ASYM)"
        self.takes = f"W2A16, W3A16, W4A16 or W8A16{offsets}"

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        quantization = published(quantization)
        return quantization.get("quant_method") == "gptq" and self.name == stored_as(quantization)

    def schemes(
        self, quantization: Mapping[str, Any], source: TensorSource
    ) -> dict[str, LayerScheme]:
        modules = modules_with("qweight", source)
        return read_schemes(published(quantization), modules, source.folder)

    def refusal(self, scheme: LayerScheme, shape: tuple[int, int] | None = None) -> str | None:
        spec = scheme.weights
        if scheme.input_activations is not None:
            return f"{self.name} stores weights alone, not how inputs are quantized"
        if spec.type != "int" or spec.num_bits not in BITS:
            return f"{self.name} holds whole numbers of 2, 3, 4 or 8 bits"
        if not isinstance(spec.granularity, Channel | Group):
            return f"{self.name} holds scales of groups or channels, not {spec.granularity}"
        return None if shape is None else self._shape_refusal(spec, shape)

    def risk(self, scheme: LayerScheme) -> str | None:
        if self.version == 2 or scheme.weights.symmetric:
            return None
        return "asymmetric ranges may have zero-points of 0, which version 1 cannot store"

    def _shape_refusal(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        unit = 32 if spec.num_bits == 3 else 32 // spec.num_bits
        for what, count in zip(("rows", "columns"), shape, strict=True):
            if count % unit:
                return (
                    f"{self.name} fills whole words, which {count} {what} do not (a multiple of "
                    f"{unit} does)"
                )
        match spec.granularity:
            case Group(size) if shape[1] % size:
                return f"groups of {size} do not divide {shape[1]} columns"
        return None

    def compress(self, module: str, q: Quantized, scheme: LayerScheme) -> dict[str, Tensor]:
        assert scheme.weights == q.spec, (scheme, q.spec)
        columns = q.codes.shape[1]
        g_idx = plain_g_idx(columns, q.spec) if q.g_idx is None else q.g_idx
        tensors = {
            "qweight": pack_bits(q.codes, q.spec.num_bits).T,
            "qzeros": pack_bits(self._stored_zeros(module, q), q.spec.num_bits),
            "scales": q.scale.T,
            "g_idx": g_idx,
        }
        return {f"{module}.{leaf}": t.contiguous() for leaf, t in tensors.items()}

    def _stored_zeros(self, module: str, q: Quantized) -> Tensor:
        """Zero-points as signed codes [groups, out], as this version has them."""
        lowest = -(1 << (q.spec.num_bits - 1))
        if q.zero_point is None:
            zeros = torch.zeros(q.scale.shape, dtype=torch.int8, device=q.scale.device)
        else:
            zeros = q.zero_point
        if self.version == 1:
            if not zeros.is_meta and bool((zeros == lowest).any()):
                raise UserError(
                    f"'{module}' has zero-points of 0, which gptq (version 1) cannot store, since "
                    "it stores them minus one; choose gptq_v2"
                )
            zeros = zeros - 1
        return zeros.T.contiguous()

    def decompress(
        self, module: str, names: Container[str], get: Get, spec: QuantSpec
    ) -> Quantized:
        packed = read_matrix(get, f"{module}.qweight", torch.int32)
        rows, columns = packed.shape[1], packed.shape[0] * 32 // spec.num_bits
        if packed_words(columns, spec.num_bits) != packed.shape[0]:
            raise UserError(
                f"{module}.qweight has {packed.shape[0]} rows of words, which codes of "
                f"{spec.num_bits} bits do not fill: the checkpoint is damaged"
            )
        check_groups(module, columns, spec)
        codes = unpack_bits(packed.T.contiguous(), spec.num_bits, columns)
        scale = read_float_scale(get, f"{module}.scales").T.contiguous()
        zero_point = self._read_zeros(module, get, spec, rows)
        g_idx = None
        if f"{module}.g_idx" in names:
            g_idx = read_g_idx(get, f"{module}.g_idx", columns, spec)
        q = checked(module, Quantized(codes, scale, zero_point, spec, None, g_idx), "scales",
                    "qzeros")  # fmt: skip
        if not spec.symmetric:
            return q
        if zero_point.any():
            raise UserError(
                f"{module}.qzeros holds zero-points other than {1 << (spec.num_bits - 1)}, but "
                "config.json says sym: the checkpoint is damaged (or sym should be false)"
            )
        return q._replace(zero_point=None)

    def _read_zeros(self, module: str, get: Get, spec: QuantSpec, rows: int) -> Tensor:
        """Zero-points int8 [out, groups], also of symmetric linears."""
        packed = read_matrix(get, f"{module}.qzeros", torch.int32)
        if packed.shape[1] != packed_words(rows, spec.num_bits):
            raise UserError(
                f"{module}.qzeros holds {packed.shape[1]} words a group, but {rows} rows take "
                f"{packed_words(rows, spec.num_bits)}: the checkpoint is damaged"
            )
        zeros = unpack_bits(packed, spec.num_bits, rows).T.contiguous()
        if self.version == 2:
            return zeros
        if bool((zeros == (1 << (spec.num_bits - 1)) - 1).any()):
            raise UserError(
                f"{module}.qzeros holds zero-points of {1 << spec.num_bits}, beyond {spec.num_bits}"
                "-bit codes: they were 0 and have wrapped, or the checkpoint is gptq_v2 labelled "
                "gptq (then set checkpoint_format in config.json)"
            )
        return zeros + 1

    def shape(self, module: str, spec: QuantSpec, source: TensorSource) -> tuple[int, int]:
        words, rows = matrix_shape(f"{module}.qweight", source)
        return rows, words * 32 // spec.num_bits

    def config(
        self,
        schemes: Mapping[str, LayerScheme],
        ignore: list[str],
        version: str,
        act_order: bool = False,
    ) -> dict[str, Any]:
        return gptq_config(self.name, schemes, ignore, version, act_order)

    def side_files(self, quantization: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {"quantize_config.json": dict(quantization)}

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def relabelled(
        self, schemes: Mapping[str, LayerScheme], source: TensorSource
    ) -> tuple[Layout, str | None]:
        """By the zero-points of some symmetric linears, which are known beforehand."""
        symmetric = [m for m, s in schemes.items() if s.weights.symmetric]
        sample = symmetric[:: max(1, len(symmetric) // SAMPLED)]
        found = version_of(
            (schemes[m].weights.num_bits, source.get(f"{m}.qzeros"))
            for m in sample
            if f"{m}.qzeros" in source
        )
        if found is None or found == self.version:
            return self, None
        other = GPTQ(found)
        return other, (
            f"config.json says {self.name}, but the zero-points of its symmetric linears are those "
            f"of {other.name}; read as {other.name}"
        )


def version_of(qzeros: Iterable[tuple[int, Tensor]]) -> Literal[1, 2] | None:
    """The version that the zero-points of symmetric linears are of; None where they do not tell.

    qzeros: (num_bits, int32 words [groups, out * b / 32]). All have to say the same.
    """
    versions: set[Literal[1, 2] | None] = set()
    for num_bits, words in qzeros:
        if words.dtype != torch.int32 or words.dim() != 2 or not words.numel():
            return None
        count = words.shape[1] * 32 // num_bits
        if packed_words(count, num_bits) != words.shape[1]:
            return None
        signed = unpack_bits(words, num_bits, count)
        versions.add(2 if bool((signed == 0).all()) else 1 if bool((signed == -1).all()) else None)
    return versions.pop() if len(versions) == 1 else None


def stored_as(quantization: Mapping[str, Any]) -> str:
    """The format that a GPTQ config names; transformers calls the key format, others
    checkpoint_format, and those older than either mean version 1."""
    named = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    return str(named).lower()
