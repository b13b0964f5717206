"""What llama.cpp multiplies a file's matrices with: their inputs, rounded for the integer products.

On a CPU llama.cpp rounds what a matrix reads to the type that its own type is multiplied with:
8 bits in blocks of 32 under a float16 scale for the types of blocks of 32, in blocks of 256 under a
float32 scale for those of 256, float16 or bfloat16 where the matrix is that. Keys and values in
float16, and the float16 sums of blocks that Q4_1 and Q5_1 use, are left out: far smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..quantize.gguf.as_folder import contents_behind
from ..quantize.gguf.blocks import CODECS
from ..quantize.gguf.blocks.legacy import Q8_0
from ..quantize.gguf.names import EMBEDDING, OUTPUT
from ..quantize.gguf.reader import GGUFFile
from ..quantize.gguf.to_hf import read_hyperparameters, tensor_table

InputHook = Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A forward pre-hook that puts in place of the input what its rounded form is worth."""

SUPER = 256  # columns of a K block
HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


def llamacpp_inputs(folder: Path) -> dict[str, InputHook]:
    """The hook of each matrix that reads rounded inputs, by its module's name in the checkpoint.

    folder: of a GGUF file (as_folder.py), UserError for another.
    """
    found = contents_behind(folder)
    if found is None:
        raise UserError(
            f"{folder} stands for no GGUF file: llama.cpp's rounding of inputs is known for these "
            "alone; give a GGUF file, or leave the inputs exact"
        )
    file = GGUFFile(found.path)
    h = read_hyperparameters(file)
    kinds = {
        name.removesuffix(".weight"): file.tensors[place.target.name].kind
        for name, place in tensor_table(file, h).items()
        if place.target.part == "weight"
    }
    outer = {slot.name: module for module, slot in h.architecture.outer.items()}
    embedding = kinds.pop(outer[EMBEDDING])  # its rows are looked up
    kinds.setdefault(outer[OUTPUT], embedding)
    return {module: _hook(kind) for module, kind in kinds.items() if kind != "F32"}


def rounded_input(x: Tensor, kind: str) -> Tensor:
    """x [..., in] as a matrix of block type `kind` reads it, in x's dtype."""
    if kind == "F32":
        return x
    if kind in HALVES:
        return x.to(HALVES[kind]).to(x.dtype)
    rows = x.float().reshape(-1, min(CODECS[kind].block, SUPER))
    if CODECS[kind].block == SUPER:
        return _in_superblocks(rows).view(x.shape).to(x.dtype)
    return Q8_0.decode_blocks(Q8_0.encode_blocks(rows, None)).view(x.shape).to(x.dtype)


def _in_superblocks(x: Tensor) -> Tensor:
    """x float32 [n, 256] in 8 bits: the value of largest size is -127 steps, the others nearest."""
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    steps = torch.full_like(peak, -127.0)  # number / tensor would be rounded twice
    inverse = steps / torch.where(peak == 0, 1.0, peak)
    return (x * inverse).round().clamp(max=127) * (torch.ones_like(peak) / inverse)


def _hook(kind: str) -> InputHook:
    def rounded(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = inputs
        return rounded_input(x, kind), *others

    return rounded
