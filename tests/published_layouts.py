"""Checkpoints as other programs write them, packed number by number after the published layouts.

Nothing of lowbit's packing is used: words are put together as Python integers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Grid(NamedTuple):
    """Unsigned codes [out, in], zeros [out, groups] int64, scales float16 [out, groups] and the
    group of each column [in]: value = (code - zero) * scale."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def values(self) -> Tensor:
        zeros, scales = self.zeros[:, self.g_idx], self.scales.float()[:, self.g_idx]
        return (self.codes - zeros).float() * scales


def grid_of(
    w: Tensor,
    num_bits: int,
    group_size: int,
    symmetric: bool,
    negative: bool = False,
    shuffled: bool = False,
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
    scales = scales.half()
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


def write_checkpoint(
    source: Path,
    out: Path,
    quantization: dict[str, Any],
    grid: Callable[[Tensor], Grid],
    pack: Callable[[str, Grid], dict[str, Tensor]],
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
