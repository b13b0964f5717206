"""Random weights of packed linears, to time their kernels with."""

from __future__ import annotations

import torch

from ..kernels.linear_ops import LinearOperands, LinearProblem


def packed_bytes(p: LinearProblem) -> int:
    """Of the codes alone."""
    return p.out_features * p.in_features * p.num_bits // 8


def random_operands(p: LinearProblem, device: torch.device | str = "cuda") -> LinearOperands:
    """Codes and scales on `device`, and zero-points where the problem has them."""
    shape, half = (p.out_features, p.in_features), 1 << (p.num_bits - 1)
    codes = torch.randint(-half, half, shape, dtype=torch.int8, device=device)
    if p.kind == "float":
        codes = codes.to(torch.float8_e4m3fn)
    groups = p.out_features, -(-p.in_features // p.group_size)
    zero = None
    if not p.symmetric:
        zero = torch.randint(-half, half, groups, dtype=torch.int8, device=device)
    return LinearOperands(codes, torch.rand(groups, device=device) * 0.01, zero)
