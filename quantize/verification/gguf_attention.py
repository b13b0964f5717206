"""Whether attn_k and attn_v of a GGUF file are each other's.

Where both have one shape, nothing but statistics tells, and training leaves two signs. A row of
v_proj and the columns of o_proj that read it are factors of one product, and weight decay makes
such factors alike in size, so the logarithms of their norms correlate; those of k_proj's rows and
the same columns have no reason to. And rotary embeddings turn some of a head's dimensions fast and
some slowly, so the rows of k_proj differ more in norm than those of v_proj. One layer may be an
exception; the mean of several: in SmolLM2-135M 0.72 with v_proj and 0.01 with k_proj, and a spread
of logarithms of 0.12 and 0.32; in a TinyStories model of 260,000 weights 0.41 and -0.25, 0.12 and
0.51.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ..gguf.container import Container, StoredTensor
from ..gguf.reader import dequantized, read_rows
from .findings import Finding, finding

LAYERS = 8  # that are looked at, spread over the model
CLEARLY = 0.3  # by how much the correlation of the one is above the other's
Placed = dict[str, tuple[Path, StoredTensor]]


class Likeness(NamedTuple):
    """Means over layers: how rows correlate with the output's columns, and how they spread."""

    k_with_output: float
    v_with_output: float
    k_spread: float
    v_spread: float

    @property
    def exchanged(self) -> bool:
        """Whether k is what v should be, by both signs."""
        alike = self.k_with_output - self.v_with_output > CLEARLY < self.k_with_output
        return alike and self.v_spread > self.k_spread


def examine_attention(containers: dict[Path, Container]) -> Iterator[Finding]:
    """The parts of a whole file, the first with its keys."""
    tensors: Placed = {
        name: (path, stored) for path, c in containers.items() for name, stored in c.tensors.items()
    }
    keys = next(iter(containers.values())).keys
    kv_heads = keys.get(f"{keys.get('general.architecture')}.attention.head_count_kv")
    if type(kv_heads) is not int or kv_heads < 1:
        return
    layers = [i for i in range(len(tensors)) if _fits(tensors, i, kv_heads)]
    if not layers:
        return
    step = -(-len(layers) // LAYERS)
    told = [_layer(tensors, i, kv_heads) for i in layers[::step]]
    seen = [t for t in told if t is not None]
    if not seen:
        return
    mean = Likeness(*(sum(column) / len(seen) for column in zip(*seen, strict=True)))
    if mean.exchanged:
        expected = "attn_v as what attn_output reads, attn_k as what rotates"
        found = f"attn_k's rows go with attn_output (correlation {mean.k_with_output:.2f}), "
        found += f"attn_v's do not ({mean.v_with_output:.2f}): each other's?"
        yield finding("GGUF attention", f"attn_k and attn_v of {len(seen)} layers", expected, found)


def likeness(k: Tensor, v: Tensor, output: Tensor, kv_heads: int) -> Likeness:
    """Of one layer: k, v float32 [kv_heads * head_dim, in], output float32 [out, heads * head_dim],
    whose columns lie head by head, those of one key-value head together."""
    columns = _sizes(output.T).view(kv_heads, -1, len(k) // kv_heads).mean(1).flatten()
    rows_k, rows_v = _sizes(k), _sizes(v)
    return Likeness(
        _correlation(rows_k, columns), _correlation(rows_v, columns),
        float(rows_k.std()), float(rows_v.std()),
    )  # fmt: skip


def _sizes(matrix: Tensor) -> Tensor:
    """The logarithm of each row's norm."""
    return matrix.norm(dim=1).clamp_min(1e-20).log()


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b])).nan_to_num()[0, 1])


def _names(layer: int) -> list[str]:
    return [f"blk.{layer}.attn_{part}.weight" for part in ("k", "v", "output")]


def _fits(tensors: Placed, layer: int, kv_heads: int) -> bool:
    """Whether the layer has the three matrices, keys and values of one shape, in such heads."""
    names = _names(layer)
    if not all(name in tensors for name in names):
        return False
    k, v, output = (tensors[name][1].shape for name in names)
    if not len(k) == len(v) == len(output) == 2 or k != v:
        return False
    return k[0] % kv_heads == 0 and output[1] % k[0] == 0 and k[0] > 2


def _layer(tensors: Placed, layer: int, kv_heads: int) -> Likeness | None:
    """None where the values cannot be computed, as is said where blocks are examined."""
    values = []
    for name in _names(layer):
        path, stored = tensors[name]
        try:
            values.append(dequantized(path, name, stored, read_rows(path, stored)))
        except UserError:
            return None
    k, v, output = values
    return likeness(k, v, output, kv_heads)
