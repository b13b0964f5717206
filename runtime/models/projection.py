"""The linears of a decoder: those that read one input as one product, weights as kernels take them.

Packed checkpoints come with their products (runtime/fused.py); those of unquantized weights are
made here. Where a kernel keeps a weight in its own layout (kernels/plain_linear.py), the module's
linears become parts of it, so that no weight is held twice; where it does not, they become views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.plain_linear import PlainProblem, choose_plain
from ..fused import joined, put_parts

Linear = Callable[[Tensor], Tensor]


class PlainLinear(nn.Module):
    """y = x @ W.T + bias, W floats in a kernel's own layout; x [..., in] to [..., out]."""

    def __init__(
        self, weight: Tensor, bias: nn.Parameter | None, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        problem = PlainProblem(weight.dtype, weight.device.type, batch_invariant, self.in_features)
        self.kernel = choose_plain(problem).candidate
        self.packed = self.kernel.pack(weight.detach())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel.run(x, self.packed, self.bias)

    def onto(self, stream: Tensor, x: Tensor) -> Tensor | None:
        """stream + y by one op; None where there is none."""
        add = self.kernel.add
        return None if add is None else add(x, self.packed, self.bias, stream)


class Projection:
    """`linears` side by side: x [tokens, in] to [tokens, sum of outs]."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = list(linears)

    @classmethod
    def in_module(
        cls, module: Any, fused: str, apart: Sequence[str], batch_invariant: bool = False
    ) -> Projection:
        """The linear `fused` of a module where it has one, else those named `apart`: as one where
        their weights are floats."""
        if getattr(module, fused, None) is not None:
            return cls([in_place(module, fused, batch_invariant)])
        linears = [getattr(module, name) for name in apart]
        if not all(_is_plain(linear) for linear in linears):
            return cls([in_place(module, name, batch_invariant) for name in apart])
        biases = [linear.bias for linear in linears]
        if len({bias is None for bias in biases}) > 1:
            return cls([in_place(module, name, batch_invariant) for name in apart])
        bias = None if biases[0] is None else joined(biases)
        whole = PlainLinear(joined([linear.weight for linear in linears]), bias, batch_invariant)
        if whole.kernel.repacks:
            setattr(module, fused, whole)
            put_parts(module, whole, apart)
        return cls([whole])

    def __call__(self, x: Tensor) -> Tensor:
        outs = self._outs(x)
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    def parts(self, x: Tensor, heads: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
        """The product by heads: [tokens, heads[i], head_dim] for each i."""
        outs = [y.view(y.shape[0], -1, head_dim) for y in self._outs(x)]
        return outs[0].split_with_sizes(list(heads), dim=1) if len(outs) == 1 else tuple(outs)

    def _outs(self, x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in self.linears]


def in_place(module: Any, name: str, batch_invariant: bool = False) -> Linear:
    """The linear `name` of a module as it runs. One of floats is replaced in the module where its
    kernel has the weight in a layout of its own."""
    linear = getattr(module, name)
    if not _is_plain(linear):
        return linear
    plain = PlainLinear(linear.weight, linear.bias, batch_invariant)
    if plain.kernel.repacks:
        setattr(module, name, plain)
    return plain


def output_head(model: Any, batch_invariant: bool = False) -> Linear:
    """The output head as it runs; one that is tied to the embedding is kept beside it where its
    kernel has the weight in a layout of its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not _is_plain(head):
        return head
    plain = PlainLinear(head.weight, head.bias, batch_invariant)
    if plain.kernel.repacks and head.weight is not embedding.weight:
        model.set_output_embeddings(plain)
    return plain


def _is_plain(linear: Any) -> bool:
    return type(linear) is nn.Linear
