"""Packed experts on a GPU: what the grouped kernel (triton_ops/moe_gemm.py) takes, and its layout,
which is that of kernels/wna16_layout.py with the experts' weights one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .linear_ops import LinearOperands
from .linear_wna16 import WNA16, group_size, pack_wna16
from .moe_ops import ExpertsKernel, ExpertsProblem
from .triton_ops.moe_gemm import SMALL_TILES, moe_gemm
from .wna16_layout import WNA16Format


def _decline(problem: ExpertsProblem) -> str | None:
    if problem.linear.activation is not None:
        return "takes inputs that are not quantized"
    return WNA16.decline(problem.linear)


def pack_experts(
    operands: Sequence[LinearOperands], problem: ExpertsProblem
) -> tuple[Tensor, Tensor]:
    """words int16 [experts, tiles, planes, out, 32] and scale int32 [experts, groups, out]."""
    packed = [pack_wna16(expert, problem.linear) for expert in operands]
    return torch.stack([p.words for p in packed]), torch.stack([p.scale for p in packed])


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], expert_ids: Tensor, problem: ExpertsProblem
) -> Tensor:
    linear = problem.linear
    fmt = WNA16Format(linear.num_bits, group_size(linear), not linear.symmetric)
    words, scale = tensors
    tiles = SMALL_TILES if linear.batch_invariant else None
    return moe_gemm(x, words, scale, expert_ids, fmt, tiles)


GROUPED = ExpertsKernel("grouped", _decline, pack_experts, _run)
