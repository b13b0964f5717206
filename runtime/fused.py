"""Linears that read the same input, as one product.

One call for q, k and v, and one for gate and up, take less time than five: fewer calls, and inputs
that are quantized once. The product is a module of its own, and each linear that it stands for is
left a `LinearPart`, so that Hugging Face's module still runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..quantize.quantized import Quantized

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What a product is called, and the linears of one module that it computes, in this order."""

SHARED_INPUTS = {"opt", "stablelm", "glm", "glm4"}
"""Models beside the decoder's families whose linears of these names read one input."""


class Fusion(NamedTuple):
    """module: where the product goes; parts: the linears, by name in the model."""

    module: str
    parts: tuple[str, ...]


def fusions(linears: Iterable[str], may_join: Callable[[Sequence[str]], bool]) -> list[Fusion]:
    """The products to run, in the order of `linears` (names in the model): those that FUSED knows,
    where all parts are there and `may_join`, and each of the others alone, under its own name."""
    names, made, done = set(linears), list[Fusion](), set[str]()
    for name in linears:
        parent, dot, leaf = name.rpartition(".")
        whole = next((w for w, leaves in FUSED.items() if leaf in leaves), None)
        fusion = Fusion(name, (name,))
        if whole is not None:
            parts = tuple(f"{parent}{dot}{part}" for part in FUSED[whole])
            if names.issuperset(parts) and may_join(parts):
                fusion = Fusion(f"{parent}{dot}{whole}", parts)
        if name not in done:
            made.append(fusion)
            done.update(fusion.parts)
    return made


def can_join(weights: Sequence[Quantized], input_scales: Sequence[Tensor | None]) -> bool:
    """Whether weights of one scheme give as one matrix what they give apart: their columns go in
    one order, and what is one number for all of a weight is the same in all."""
    return all(
        _same([getattr(w, name) for w in weights]) for name in ("g_idx", "global_scale")
    ) and _same(input_scales)


def _same(tensors: Sequence[Tensor | None]) -> bool:
    first, *others = tensors
    if first is None:
        return all(t is None for t in others)
    return all(t is not None and torch.equal(t, first) for t in others)


class SharedProduct:
    """The product `whole` of x, handed out in parts: the first part of an x that is asked for
    computes it. x must not be written to before the last part of it is taken."""

    def __init__(self, whole: nn.Module, heights: Sequence[int]) -> None:
        self.whole, self.heights = whole, list(heights)
        self._x: Tensor | None = None
        self._left: list[Tensor | None] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        if self._x is not x or self._left[index] is None:
            self._x, self._left = x, list(self.whole(x).split(self.heights, dim=-1))
        part, self._left[index] = self._left[index], None
        assert part is not None
        if all(other is None for other in self._left):
            self._x = None  # nothing is kept longer than it is wanted
        return part


class LinearPart(nn.Module):
    """Some rows of a product, in place of the linear that they are: x [..., in] to [..., out].

    bias: the parameter of that linear, a part of the product's own.
    """

    def __init__(
        self, product: SharedProduct, index: int, bias: nn.Parameter | None, in_features: int
    ) -> None:
        super().__init__()
        self.product, self.index, self.bias = product, index, bias
        self.in_features, self.out_features = in_features, product.heights[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(x, self.index)

    def extra_repr(self) -> str:
        return f"part {self.index} of {tuple(self.product.heights)} rows"


def put_parts(parent: nn.Module, whole: nn.Module, leaves: Sequence[str]) -> None:
    """Replace the linears `leaves` of `parent` by parts of the product `whole`."""
    linears = [parent.get_submodule(leaf) for leaf in leaves]
    product = SharedProduct(whole, [int(linear.out_features) for linear in linears])  # pyright: ignore
    for index, (leaf, linear) in enumerate(zip(leaves, linears, strict=True)):
        part = LinearPart(product, index, linear.bias, linear.in_features)  # pyright: ignore
        setattr(parent, leaf, part)


def join_biases(whole: nn.Module, parts: Sequence[LinearPart]) -> None:
    """Give a product the biases of its parts, which become views of it; all have one, or none."""
    biases = [part.bias for part in parts if part.bias is not None]
    if biases:
        assert len(biases) == len(parts)
        whole.bias = joined(biases)


def joined(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter, of which `parameters` become views."""
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return nn.Parameter(whole, requires_grad=False)
