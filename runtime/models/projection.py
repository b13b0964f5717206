"""Linears that read the same input, as one product where their weights allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Projection:
    """`linears` side by side: x [tokens, in] to [tokens, sum of outs].

    Dense linears become views of one weight, so that nothing is held twice; packed ones are run one
    by one unless the loader has packed them together.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self._linears = _fused(linears)

    @classmethod
    def in_module(cls, module: Any, fused: str, apart: Sequence[str]) -> Projection:
        """The linear `fused` of a module where it has one, else those named `apart`."""
        whole = getattr(module, fused, None)
        return cls([getattr(module, n) for n in apart] if whole is None else [whole])

    def __call__(self, x: Tensor) -> Tensor:
        outs = [linear(x) for linear in self._linears]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    def parts(self, x: Tensor, heads: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
        """The product by heads: [tokens, heads[i], head_dim] for each i."""
        outs = [linear(x).unflatten(-1, (-1, head_dim)) for linear in self._linears]
        return outs[0].split(list(heads), dim=1) if len(outs) == 1 else tuple(outs)


def _fused(linears: Sequence[Any]) -> list[Any]:
    dense = all(type(linear) is nn.Linear for linear in linears)
    biased = {linear.bias is not None for linear in linears if dense}
    if len(linears) == 1 or not dense or len(biased) > 1:
        return list(linears)
    heights = [linear.out_features for linear in linears]
    whole = nn.Linear(linears[0].in_features, sum(heights), biased.pop(), device="meta")
    whole.weight = _joined([linear.weight for linear in linears])
    if whole.bias is not None:
        whole.bias = _joined([linear.bias for linear in linears])
    return [whole]


def _joined(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter of which `parameters` become views."""
    joined = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return nn.Parameter(joined, requires_grad=False)
