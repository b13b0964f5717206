"""Packed 2-, 3-, 4- and 8-bit linear on a GPU: the Triton kernels of `triton_ops/wna16_gemm.py`.

Up to `FUSED_ROWS` tokens the packed weights are multiplied as they are; above, the arithmetic takes
longer than the weights, and they are dequantized, a chunk of rows that stays in the L2 cache at a
time, for the dense product. With `batch_invariant` one fused configuration serves every batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear_ops import LinearKernel, LinearOperands, LinearProblem
from .triton_ops.shim import decline_triton
from .triton_ops.tiles import GemmConfig
from .wna16_layout import (
    PLANE_WIDTHS,
    PackedWeight,
    WNA16Format,
    decline_groups,
    pack_scales,
    pack_words,
    tile_columns,
)

CHUNK_WEIGHTS = 1 << 24  # 32 MiB of float16


def _decline(problem: LinearProblem) -> str | None:
    reason = decline_triton(problem.device)
    if reason is not None:
        return reason
    if problem.kind != "int":
        return "holds whole numbers, not floats"
    if problem.num_bits not in PLANE_WIDTHS:
        return f"holds 2-, 3-, 4- or 8-bit codes, not {problem.num_bits}-bit"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 or bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    return decline_groups(problem.num_bits, group_size(problem))


def group_size(problem: LinearProblem) -> int:
    """Columns that share a scale; 0 where a whole row does."""
    return 0 if problem.group_size >= problem.in_features else problem.group_size


def pack_wna16(operands: LinearOperands, problem: LinearProblem) -> PackedWeight:
    """The kernel's layout of a weight. Groups of padded columns get a scale of zero."""
    from .triton_ops.wna16_gemm import LOCK_ROWS
    from .wna16_forms import BLOCK_N

    codes, half, group = operands.codes, 1 << (problem.num_bits - 1), group_size(problem)
    unsigned = (codes.to(torch.int16) + half).to(torch.uint8)
    words = pack_words(unsigned, problem.num_bits)
    scale, zero = operands.float_scale(), operands.zero_point
    columns = len(words) * tile_columns(problem.num_bits)
    groups = -(-columns // group) if group else 1
    missing = groups - scale.shape[1]
    zero = None if zero is None else F.pad(zero.to(torch.int16) + half, (0, missing))
    locks = LOCK_ROWS * -(-len(codes) // BLOCK_N)
    return PackedWeight(
        words,
        pack_scales(F.pad(scale, (0, missing)), zero),
        torch.zeros(locks, dtype=torch.int32, device=codes.device),
    )


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    from .tuned import tuned_choice
    from .wna16_forms import FUSED_ROWS, pinned_config, wna16_config

    rows, shape = x.numel() // problem.in_features, tile_question(problem, x.device)
    tuned = tuned_choice(WNA16.name, problem, rows, x.device)
    if problem.batch_invariant:
        config = pinned_config(*shape)
    elif tuned is not None:
        config = tuned.config
    else:
        fused = rows <= FUSED_ROWS[problem.num_bits]
        config = wna16_config(rows, *shape) if fused else None
    return run_wna16(x, tensors, bias, problem, config)


def tile_question(problem: LinearProblem, device: torch.device) -> tuple[int, int, int, int | str]:
    """What tiles are chosen by beside the number of tokens, as `wna16_forms` takes it."""
    from .triton_ops.launch import launch_arch

    tiles = -(-problem.in_features // tile_columns(problem.num_bits))
    return problem.out_features, tiles, problem.num_bits, launch_arch(device)


def run_wna16(
    x: Tensor,
    tensors: tuple[Tensor, ...],
    bias: Tensor | None,
    problem: LinearProblem,
    config: GemmConfig | None,
) -> Tensor:
    """y [..., out] of x [..., in] with tiles of `config`; None: dequantized for a dense product."""
    from .triton_ops.wna16_gemm import wna16_gemm

    weight = PackedWeight(*tensors)
    fmt = WNA16Format(problem.num_bits, group_size(problem), not problem.symmetric)
    rows = x.reshape(-1, problem.in_features)
    if config is None:
        y = _dense(rows, weight, bias, fmt)
    else:
        y = wna16_gemm(rows, weight, bias, fmt, config)
    return y.view(*x.shape[:-1], problem.out_features)


def _dense(x: Tensor, weight: PackedWeight, bias: Tensor | None, fmt: WNA16Format) -> Tensor:
    from .triton_ops.wna16_gemm import wna16_dequantize

    columns, out_features = x.shape[1], weight.words.shape[2]
    y = x.new_empty(len(x), out_features)
    step = max(1, CHUNK_WEIGHTS // columns)
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        w = wna16_dequantize(weight, columns, fmt, x.dtype, start, stop)
        y[:, start:stop] = F.linear(x, w, None if bias is None else bias[start:stop])
    return y


WNA16 = LinearKernel("wna16", _decline, pack_wna16, _run)
