"""Where each tensor of a model goes in a file, and how it is turned on the way, both ways.

Hugging Face rotates the two halves of a head against each other, llama.cpp's `llama` neighbouring
pairs: so there the rows of q_proj and k_proj are interleaved. That moves whole rows, hence is exact
on rows that are already quantized. Gemma's norms multiply by 1 + weight, llama.cpp's by the weight.
GPT-2 stores its weights as [in, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from .architecture import Slot
from .hparams import Hyperparameters

EMBEDDING, OUTPUT = "token_embd", "output"
FLOAT32 = (  # matrices that every file holds in float32: routers and positions
    "position_embd", "ffn_gate_inp", "ffn_gate_inp_shexp",
)  # fmt: skip


class Target(NamedTuple):
    """A tensor of a file. `shape` has rows first. `modules`: of the model, in the order in which
    they are stacked along the first dimension where it is one of experts. `part`: "weight" or
    "bias". `heads`: whose rows are interleaved, `offset`: what is added."""

    name: str
    shape: tuple[int, ...]
    modules: tuple[str, ...]
    part: str
    stacked: bool = False
    transposed: bool = False
    heads: int | None = None
    offset: float = 0.0

    @property
    def float32(self) -> bool:
        """Whether it is float32 whatever the file's type."""
        slot = self.name.removesuffix(".weight").rpartition(".")[2]
        return len(self.shape) < 2 or slot in FLOAT32

    @property
    def module_shape(self) -> tuple[int, ...]:
        """The shape of each module's tensor."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    def place(self, x: Tensor) -> Tensor:
        """A module's tensor as it lies in the file; interleaving alone is done to codes as well."""
        x = x.T.contiguous() if self.transposed else x
        x = x if self.heads is None else interleave(x, self.heads)
        return x + self.offset if self.offset else x

    def take(self, x: Tensor) -> Tensor:
        """The inverse of `place`."""
        x = x - self.offset if self.offset else x
        x = x if self.heads is None else deinterleave(x, self.heads)
        return x.T.contiguous() if self.transposed else x


def targets(h: Hyperparameters) -> Iterator[Target]:
    """Every tensor that a file of `h` can have, in the model's order; a bias after its weight.

    Which biases there are, the model or the file has to say.
    """
    a = h.architecture
    slots = {slot.name: (module, slot) for module, slot in a.outer.items()}
    last = (OUTPUT, "output_norm")
    for name, (module, slot) in slots.items():
        if name not in last:
            yield from _of_slot(h, name, (module,), slot)
    for i in range(h["num_hidden_layers"]):
        for module, slot in a.layer.items():
            path = f"{a.layers}.{i}.{module}"
            experts = range(h["num_experts"]) if slot.expert else ()
            modules = tuple(path.replace(".E.", f".{e}.") for e in experts) or (path,)
            yield from _of_slot(h, f"blk.{i}.{slot.name}", modules, slot)
    module, slot = slots["output_norm"]
    yield from _of_slot(h, "output_norm", (module,), slot)
    module, slot = slots[OUTPUT]
    if not h.tied:
        yield from _of_slot(h, OUTPUT, (module,), slot)
    elif a.always_output:
        yield next(_of_slot(h, OUTPUT, (slots[EMBEDDING][0],), slot))


def _of_slot(
    h: Hyperparameters, name: str, modules: tuple[str, ...], slot: Slot
) -> Iterator[Target]:
    """The weight and the bias of a slot."""
    sizes = h.dimensions()
    shape = tuple(sizes[d] for d in slot.shape)
    heads = None if slot.heads is None else h[slot.heads]
    if slot.expert:
        yield Target(f"{name}.weight", (len(modules), *shape), modules, "weight", stacked=True)
        return
    norm = len(shape) == 1
    offset = h.architecture.norm_offset if norm else 0.0
    yield Target(f"{name}.weight", shape, modules, "weight", False, slot.transposed, heads, offset)
    yield Target(f"{name}.bias", shape[:1], modules, "bias", heads=heads)


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Hugging Face's row order to llama.cpp's: [heads * head_dim, ...], halves become pairs."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def deinterleave(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `interleave`."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
