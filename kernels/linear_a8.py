"""Linear with 8-bit inputs on a GPU: W8A8, FP8 and W4A8, by `triton_ops/a8_gemm.py`.

Inputs are quantized by `triton_ops/act_quant.py`, and the codes multiplied as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .a8_layout import A8Weight, pack_halves
from .linear_ops import LinearKernel, LinearOperands, LinearProblem
from .triton_ops.shim import decline_triton
from .triton_ops.tiles import GemmConfig

GROUP = 128


def _decline(problem: LinearProblem) -> str | None:
    reason = decline_triton(problem.device)
    if reason is not None:
        return reason
    activation, group = problem.activation, _group_size(problem)
    if activation is None or activation.elements.name not in ("int8", "float8"):
        return "takes inputs quantized to 8 bits"
    if activation.scale_dtype != torch.float32:
        return "takes float32 scales of inputs"
    if activation.elements.name != f"{problem.kind}8":
        return f"multiplies {activation.elements.name} with its like, not with {problem.kind}"
    if not problem.symmetric:
        return "has no zero-point"
    if problem.num_bits not in ((4, 8) if problem.kind == "int" else (8,)):
        return f"takes weights of 8 bits, or whole numbers of 4, not {problem.num_bits}"
    if activation.group_size is not None and not activation.group_size == group == GROUP:
        return f"takes scales of a token, or of {GROUP} columns beside weights' of as many"
    if problem.kind == "float" and not _has_fp8(problem.device):
        return "needs a GPU of compute capability 8.9 for 8-bit floats"
    from .triton_ops.a8_gemm import decline_a8
    from .triton_ops.act_quant import MAX_COLUMNS

    if problem.in_features > MAX_COLUMNS:
        return f"quantizes rows of at most {MAX_COLUMNS} columns, not {problem.in_features}"
    return decline_a8(problem.num_bits, group, problem.in_features)


def _has_fp8(device: str) -> bool:
    """Whether Triton converts to E4M3 there; a device that is not there is taken to."""
    if torch.version.hip or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _group_size(problem: LinearProblem) -> int:
    """Columns that share a scale; 0 where a whole row does."""
    return 0 if problem.group_size >= problem.in_features else problem.group_size


def pack_a8(operands: LinearOperands, problem: LinearProblem) -> A8Weight:
    """The kernel's layout. Packed halves unpack to 16 times their codes: so do the scales less."""
    from .a8_forms import BLOCK_N
    from .triton_ops.a8_gemm import LOCK_ROWS

    codes, scale = operands.codes.contiguous(), operands.float_scale().T.contiguous()
    if problem.num_bits == 4:
        codes, scale = pack_halves(codes), scale / 16
    locks = LOCK_ROWS * -(-problem.out_features // BLOCK_N)
    return A8Weight(codes, scale, torch.zeros(locks, dtype=torch.int32, device=codes.device))


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    static = () if operands.input_scale is None else (operands.input_scale.float().reshape(1),)
    return *pack_a8(operands, problem), *static


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    from .a8_forms import a8_config, pinned_config
    from .tuned import tuned_choice

    rows, shape = x.numel() // problem.in_features, tile_question(problem, x.device)
    tuned = tuned_choice(A8.name, problem, rows, x.device)
    if problem.batch_invariant:
        config = pinned_config(*shape)
    elif tuned is not None and tuned.config is not None:
        config = tuned.config
    else:
        config = a8_config(rows, *shape)
    return run_a8(x, tensors, bias, problem, config)


def tile_question(problem: LinearProblem, device: torch.device) -> tuple[int, int, bool, int | str]:
    """What tiles are chosen by beside the number of tokens, as `a8_forms` takes it."""
    from .a8_layout import TILE
    from .triton_ops.launch import launch_arch

    tiles = -(-problem.in_features // TILE)
    return problem.out_features, tiles, problem.kind == "float", launch_arch(device)


def run_a8(
    x: Tensor,
    tensors: tuple[Tensor, ...],
    bias: Tensor | None,
    problem: LinearProblem,
    config: GemmConfig,
) -> Tensor:
    """y [..., out] of x [..., in], quantized here, with tiles of `config`."""
    from .triton_ops.a8_gemm import a8_gemm
    from .triton_ops.act_quant import act_quant

    weight, static = A8Weight(*tensors[:3]), tensors[3] if len(tensors) > 3 else None
    assert problem.activation is not None
    codes, scales = act_quant(x.reshape(-1, problem.in_features), problem.activation, static)
    y = a8_gemm(codes, scales, weight, bias, _group_size(problem), x.dtype, config)
    return y.view(*x.shape[:-1], problem.out_features)


A8 = LinearKernel("a8", _decline, _pack, _run, quantizes_input=True)
