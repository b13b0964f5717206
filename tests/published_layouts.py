"""Checkpoints as other programs write them, packed number by number after the published layouts.

Nothing of lowbit's packing is used: words are put together as Python integers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Stored(Protocol):
    """A weight in another program's numbers; `values`: what they stand for, float32 [out, in]."""

    def values(self) -> Tensor: ...


S = TypeVar("S", bound=Stored)


class Grid(NamedTuple):
    """Unsigned codes [out, in], zeros [out, groups] int64, scales [out, groups] and the group of
    each column [in]: value = (code - zero) * scale."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def values(self) -> Tensor:
        zeros, scales = self.zeros[:, self.g_idx], self.scales.float()[:, self.g_idx]
        return (self.codes - zeros).float() * scales


class Float8(NamedTuple):
    """Codes e4m3 [out, in] and a scale for each of the blocks [rows, columns] of equal size, the
    last ones cut, that [out, in] is divided into."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    def values(self) -> Tensor:
        return self.codes.float() * _spread(self.scales.float(), self.block, self.codes.shape)


def _spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A number for each element of `shape`, that of its block."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def float8_of(w: Tensor, block: tuple[int, int]) -> Float8:
    """w [out, in] in e4m3 with a bfloat16 scale for each block."""
    rows = [band.split(block[1], 1) for band in w.split(block[0], 0)]
    peaks = torch.tensor([[float(part.abs().max()) for part in band] for band in rows])
    scales = (peaks / 448).bfloat16()
    codes = (w / _spread(scales.float(), block, w.shape)).to(torch.float8_e4m3fn)
    return Float8(codes, scales, block)


def grid_of(
    w: Tensor,
    num_bits: int,
    group_size: int,
    symmetric: bool,
    negative: bool = False,
    shuffled: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Grid:
    """w [out, in] on a grid. negative: every other scale below 0, as AutoRound has them. shuffled:
    columns in no order of groups, as desc_act leaves them. Zeros are at least 1 (version 1)."""
    rows, columns = w.shape
    highest, half = (1 << num_bits) - 1, 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(columns)
    order = torch.randperm(columns, generator=generator) if shuffled else torch.arange(columns)
    g_idx = torch.empty(columns, dtype=torch.int64)
    g_idx[order] = torch.arange(columns) // group_size
    groups = w[:, order].view(rows, -1, group_size)
    if symmetric:
        scales = groups.abs().amax(-1) / half
        zeros = torch.full(scales.shape, half)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / highest
        zeros = (-low / scales).round().long().clamp(1, highest)
    scales = scales.to(scale_dtype)
    if negative:
        scales[:, ::2] *= -1
    codes = (w / scales.float()[:, g_idx]).round().long() + zeros[:, g_idx]
    return Grid(codes.clamp(0, highest), zeros, scales, g_idx)


def words(numbers: list[int], num_bits: int) -> list[int]:
    """A dense stream of `num_bits` each, lowest bits first, as signed 32-bit words."""
    stream = sum(n << (num_bits * i) for i, n in enumerate(numbers))
    count = -(-len(numbers) * num_bits // 32)
    parts = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [p - (1 << 32) if p >= 1 << 31 else p for p in parts]


def gptq_tensors(module: str, grid: Grid, num_bits: int, version: int) -> dict[str, Tensor]:
    """qweight down the inputs of each output, qzeros along the outputs of each group."""
    stored = grid.zeros - (1 if version == 1 else 0)
    qweight = torch.tensor([words(row, num_bits) for row in grid.codes.tolist()]).T
    qzeros = torch.tensor([words(column, num_bits) for column in stored.T.tolist()])
    return {
        f"{module}.qweight": qweight.int().contiguous(),
        f"{module}.qzeros": qzeros.int(),
        f"{module}.scales": grid.scales.T.contiguous(),
        f"{module}.g_idx": grid.g_idx.int(),
    }


def awq_tensors(module: str, grid: Grid) -> dict[str, Tensor]:
    """Eight outputs a word, in AWQ's order."""

    def packed(rows: list[list[int]]) -> Tensor:
        lines = []
        for row in rows:
            eights = [row[i : i + 8] for i in range(0, len(row), 8)]
            lines.append([w for e in eights for w in words([e[k] for k in AWQ_ORDER], 4)])
        return torch.tensor(lines).int()

    return {
        f"{module}.qweight": packed(grid.codes.T.tolist()),
        f"{module}.qzeros": packed(grid.zeros.T.tolist()),
        f"{module}.scales": grid.scales.T.contiguous(),
    }


def packed_tensors(
    module: str, grid: Grid, num_bits: int, order: bool = False
) -> dict[str, Tensor]:
    """compressed-tensors' pack-quantized: codes along the inputs, zeros along the outputs. order:
    with the group of each column, as files of actorder "group" had it."""
    asymmetric = not bool((grid.zeros == 1 << (num_bits - 1)).all())
    tensors = {
        f"{module}.weight_packed": _rows_of_words(grid.codes, num_bits),
        f"{module}.weight_scale": grid.scales,
        f"{module}.weight_shape": torch.tensor(grid.codes.shape),
    }
    if asymmetric:
        zeros = _rows_of_words(grid.zeros.T, num_bits).T.contiguous()
        tensors[f"{module}.weight_zero_point"] = zeros
    if order:
        tensors[f"{module}.weight_g_idx"] = grid.g_idx.int()
    return tensors


def _rows_of_words(numbers: Tensor, num_bits: int) -> Tensor:
    return torch.tensor([words(row, num_bits) for row in numbers.tolist()]).int()


def int8_tensors(module: str, grid: Grid) -> dict[str, Tensor]:
    """compressed-tensors' int-quantized: a byte a code, a scale a row."""
    codes = (grid.codes - 128).to(torch.int8)
    return {f"{module}.weight": codes, f"{module}.weight_scale": grid.scales}


def float8_tensors(module: str, stored: Float8, peak: float | None = None) -> dict[str, Tensor]:
    """compressed-tensors' float-quantized. peak: of the inputs, where their scale is stored."""
    scales = stored.scales.flatten() if stored.scales.numel() == 1 and peak else stored.scales
    tensors = {f"{module}.weight": stored.codes, f"{module}.weight_scale": scales}
    if peak is not None:
        tensors[f"{module}.input_scale"] = torch.tensor([peak / 448]).bfloat16()
    return tensors


def write_checkpoint(
    source: Path,
    out: Path,
    quantization: dict[str, Any],
    grid: Callable[[Tensor], S],
    pack: Callable[[str, S], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """The linears of the decoder layers of `source` packed into `out`; what they stand for."""
    shutil.copytree(source, out)
    tensors, values = load_file(source / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        module, made = name.removesuffix(".weight"), grid(tensors.pop(name))
        tensors |= pack(module, made)
        values[module] = made.values()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return values


def gptq_quantization(num_bits: int, group_size: int, symmetric: bool, **more: Any) -> Any:
    """What GPTQModel writes."""
    return {
        "bits": num_bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": symmetric,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.6.0"]},
        **more,
    }


def llm_compressor_quantization(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> Any:
    """What llm-compressor 0.14.0.1 writes, with compressed-tensors 0.19.0."""
    group = {
        "format": layout,
        "input_activations": None if inputs is None else _arguments(**inputs),
        "output_activations": None,
        "targets": ["Linear"],
        "weights": _arguments(observer="memoryless_minmax", **weights),
    }
    return {
        "config_groups": {"group_0": group},
        "format": layout,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    }


def _arguments(**said: Any) -> dict[str, Any]:
    return {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
        "num_bits": 8, "observer": None, "observer_kwargs": {}, "scale_dtype": None,
        "strategy": "tensor", "symmetric": True, "type": "int", "zp_dtype": None, **said,
    }  # fmt: skip
