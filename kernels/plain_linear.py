"""Linears whose weights are floats: y = x @ W.T + bias.

oneDNN multiplies 16-bit floats from a layout of its own; torch's `linear` reorders a weight into it
on each call, which takes longer than the product until there are some hundred rows. So bfloat16
weights are reordered once. In float32 torch has MKL multiply, which is slower than oneDNN from a
few rows on, even with weights as they are (kernels/float32_linears.py).

Measured (one thread of a Zen 5 core, weights in the cache, 3072 x 576, microseconds of `linear`
and of these): bfloat16, 1 row 110 and 55, 16 rows 198 and 139, 512 rows 4105 and 3946; float32,
1 row 98 and 99, 4 rows 257 and 222, 16 rows 709 and 367. `torch.mv`, which does without oneDNN,
takes 161 for a row of bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Choice, choose
from .row_tiles import in_row_tiles

FLOAT32_ROWS = 4  # from which oneDNN is faster


class PlainProblem(NamedTuple):
    """What decides which kernel can run; of the weight and of x. batch_invariant: a row's result
    must have the same bits in every batch."""

    dtype: torch.dtype
    device: str
    batch_invariant: bool = False


@dataclass(frozen=True)
class PlainKernel:
    """One implementation. `pack(W [out, in])`: the tensor that `run(x, packed, bias)` wants;
    `repacks`: whether that is another than W. `decline(problem)`: None, or why it cannot run."""

    name: str
    decline: Callable[[PlainProblem], str | None]
    pack: Callable[[Tensor], Tensor]
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    repacks: bool = False


def _decline(
    dtype: torch.dtype, supported: Callable[[], bool], why: str
) -> Callable[[PlainProblem], str | None]:
    def decline(problem: PlainProblem) -> str | None:
        if problem.device != "cpu":
            return f"runs on cpu, not {problem.device}"
        if problem.dtype != dtype:
            return f"multiplies {_name(dtype)}, not {_name(problem.dtype)}"
        return None if supported() else why

    return decline


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_fast_float32() -> bool:
    """Whether oneDNN's float32 products use wider instructions than MKL's may."""
    avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return avx512 and torch.backends.mkldnn.is_available()


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ W.T + bias on a CPU; W float32 as it is, or bfloat16 as `ONEDNN_BF16` packs it."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() < FLOAT32_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return onednn_linear(x, weight, bias)


ONEDNN_BF16 = PlainKernel(
    "onednn_bf16",
    _decline(torch.bfloat16, _has_bfloat16, "needs oneDNN and a CPU with AVX512"),
    _reorder,
    onednn_linear,
    repacks=True,
)
ONEDNN_FLOAT32 = PlainKernel(
    "onednn_float32",
    _decline(torch.float32, has_fast_float32, "needs oneDNN and a CPU with AVX512"),
    lambda weight: weight,
    _float32,
)
TORCH = PlainKernel("torch", lambda problem: None, lambda weight: weight, F.linear)


@functools.cache
def choose_plain(problem: PlainProblem) -> Choice[PlainKernel]:
    """The kernel that runs `problem`, best first; torch's runs everything."""
    choice = choose("plain_linear", (ONEDNN_BF16, ONEDNN_FLOAT32, TORCH), problem)
    if not problem.batch_invariant:
        return choice
    run = choice.candidate.run

    def in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return in_row_tiles(lambda tile: run(tile, weight, bias), x)

    return replace(choice, candidate=replace(choice.candidate, run=in_tiles))
