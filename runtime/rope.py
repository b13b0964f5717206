"""Take cached keys back to what they were before their rotary embedding, and forth again.

Before RoPE a channel of the keys keeps its size over all tokens, so that one scale serves many of
them (KVQuant, arXiv:2401.18079). transformers hands keys to the cache after RoPE. A probe on the
attention modules therefore notes the cosines and sines of the forward pass that runs, and the
model's own function is called with them to turn back (negative sines) and forth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.errors import UserError

APPLY = "apply_rotary_pos_emb"  # what transformers' model files call it


class Rope(NamedTuple):
    """The rotary embedding of some tokens. apply: (queries, keys, cos, sin) -> both rotated;
    cos, sin [batch, tokens, rotary dimensions]."""

    apply: Callable[..., tuple[Tensor, Tensor]]
    cos: Tensor
    sin: Tensor

    def turn(self, keys: Tensor) -> Tensor:
        """Keys [batch, heads, tokens, head_dim], before RoPE, to those after, float32."""
        return self._apply(keys, self.cos.float(), self.sin.float())

    def turn_back(self, keys: Tensor) -> Tensor:
        """The inverse of `turn`."""
        cos, sin = self.cos.float(), self.sin.float()
        square = cos.square() + sin.square()  # some embeddings scale what they rotate
        return self._apply(keys, cos / square, -sin / square)

    def _apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        keys = keys.float()
        return self.apply(keys, keys, cos, sin)[1]


class RopeProbe:
    """The Rope of each layer of `model` in the forward pass that runs; hooks until `close`."""

    def __init__(self, model: Any) -> None:
        self._ropes: dict[int, Rope | None] = {}
        self._turned: set[Callable[..., Any]] = set()  # those that were found to turn back
        self._has_rope = (
            getattr(model.config.get_text_config(), "rope_parameters", None) is not None
        )
        self._handles = [
            module.register_forward_pre_hook(self._note, with_kwargs=True)
            for module in model.modules()
            if hasattr(module, "layer_idx")
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def rope(self, layer: int, keys: Tensor) -> Rope | None:
        """Of the keys [batch, heads, tokens, head_dim] that `layer` caches now; None: it has none.

        Raises UserError for models whose rotary embedding cannot be turned back.
        """
        rope = self._ropes.get(layer)
        if rope is None:
            if self._has_rope:
                raise _not_reversible("its attention is not handed the rotary embedding")
            return None
        if rope.apply not in self._turned:
            _check_reversible(rope, keys)
            self._turned.add(rope.apply)
        return rope

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        embeddings = kwargs.get("position_embeddings")
        if isinstance(embeddings, tuple) and len(embeddings) == 2:
            apply = getattr(sys.modules[type(module).__module__], APPLY, None)
            if apply is None:
                raise _not_reversible(f"its module has no {APPLY}")
            layer: Any = module.layer_idx
            self._ropes[layer] = Rope(apply, *embeddings)


def _check_reversible(rope: Rope, keys: Tensor) -> None:
    """UserError unless turning back and forth leaves `keys` as they are."""
    keys = keys.float()
    try:
        again = rope.turn(rope.turn_back(keys))
    except RuntimeError as e:
        raise _not_reversible(f"{APPLY} does not fit its keys") from e
    if not torch.allclose(again, keys, rtol=1e-3, atol=1e-3 * float(keys.abs().max())):
        raise _not_reversible(f"{APPLY} turned back and forth does not give the keys again")


def _not_reversible(reason: str) -> UserError:
    return UserError(
        f"keys of this model cannot be stored as before their rotary embedding ({reason}); choose "
        "a KV format with _postrope or _hadamard, such as int4_hadamard"
    )


class RopeTable:
    """The rotary embedding of the positions 0, 1, ... of a batch's rows, as its tokens come by.

    A row's token i has position i. Layers with the same embedding share a table.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._newest: Rope | None = None
        self._cos, self._sin = torch.empty(0), torch.empty(0)

    def add(self, rope: Rope, positions: list[int]) -> None:
        """The newest tokens': `rope` of [batch, tokens], whose rows begin at `positions`."""
        if self._newest is not None and self._newest.cos is rope.cos:
            return  # another layer has brought it
        if self._newest is None:
            self._cos = rope.cos.new_zeros(self._length, rope.cos.shape[-1])
            self._sin = torch.zeros_like(self._cos)
        self._newest = rope
        for row, begin in enumerate(positions):
            end = begin + rope.cos.shape[1]
            source = row if len(rope.cos) > 1 else 0
            self._cos[begin:end], self._sin[begin:end] = rope.cos[source], rope.sin[source]

    def first(self, tokens: int) -> Rope:
        """Of the first `tokens` positions, with a batch axis of 1."""
        assert self._newest is not None
        return Rope(self._newest.apply, self._cos[None, :tokens], self._sin[None, :tokens])
