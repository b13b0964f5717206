"""The op between the projections and attention: turn queries and keys, store keys and values.

In this order: RMS norm of each head of q and k (Qwen 3, Gemma 3), rotary embedding, the cache's
Hadamard matrix, quantization, and the write into blocks. All of it is computed in float32 and
rounded once, where the result is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import Choice, choose
from .kv_quant import rotate_heads
from .norm_ops import rms_norm_reference, wide_float
from .paged_kv import BlockPool, PoolForm, Step, places_of, write_slots
from .rotary import Rotary, rotate_positions


class HeadNorm(NamedTuple):
    """weights: [head_dim] of queries and of keys, as they multiply."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class NewTokens(Step):
    """Where the tokens of one step go. positions: int64 [tokens], for the rotary embedding. slots:
    int64 [tokens], see kernels/paged_kv.py; -1 for what is not stored. No slot stands twice."""

    positions: Tensor
    slots: Tensor


class StoreOptions(NamedTuple):
    """rotate_queries: q comes back through the Hadamard matrix that keys are stored through, for
    attention with `rotated_queries`; nothing where there is none."""

    rotary: Rotary | None = None
    norm: HeadNorm | None = None
    rotate_queries: bool = False


class StoreProblem(NamedTuple):
    """What decides which kernel can run; dtype, device: of the queries."""

    keys: PoolForm
    values: PoolForm
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"keys of {self.keys}, values of {self.values}"


@dataclass(frozen=True)
class StoreKernel:
    """One implementation. `decline(problem)`: None, or why it cannot run."""

    name: str
    decline: Callable[[StoreProblem], str | None]
    run: Callable[..., Tensor]


def kv_store_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: BlockPool,
    values: BlockPool,
    tokens: NewTokens,
    options: StoreOptions,
) -> Tensor:
    """Store k, v [tokens, kv_heads, head_dim] in the pools; returns q [tokens, heads, head_dim]
    as attention takes it, in its dtype. Any strides."""
    dtype, norm = wide_float(q.dtype), options.norm
    wide_q, wide_k = q.to(dtype), k.to(dtype)
    if norm is not None:
        wide_q = rms_norm_reference(wide_q, norm.q_weight, norm.eps).out
        wide_k = rms_norm_reference(wide_k, norm.k_weight, norm.eps).out
    if options.rotary is not None:
        both = torch.cat([wide_q, wide_k], 1)  # one pass for both
        both = rotate_positions(both, options.rotary, tokens.positions)
        wide_q, wide_k = both.split([q.shape[1], k.shape[1]], 1)
    if options.rotate_queries and keys.fmt is not None and keys.fmt.rotate:
        wide_q = rotate_heads(wide_q)
    for pool, x in ((keys, wide_k), (values, v)):
        size = pool.block_size
        places = tokens.once(("places", size), lambda size=size: places_of(tokens.slots, size))
        write_slots(pool, x, tokens.slots, places)
    return wide_q.to(q.dtype)


@functools.cache
def store_kernels() -> tuple[StoreKernel, ...]:
    """The dispatch table, best first. The last one accepts everything that can be stored."""
    from .kv_store_cpu import TORCH_CPU
    from .kv_store_triton import TRITON

    return TRITON, TORCH_CPU, StoreKernel("reference", _decline, kv_store_reference)


def choose_store(problem: StoreProblem, force: str | None = None) -> Choice[StoreKernel]:
    """The kernel that runs `problem`; UserError when the one named `force` cannot."""
    return choose("kv_store", store_kernels(), problem, force)


@functools.lru_cache(maxsize=256)
def _chosen(problem: StoreProblem, force: str | None) -> StoreKernel:
    return choose_store(problem, force).candidate


def kv_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: BlockPool,
    values: BlockPool,
    tokens: NewTokens,
    options: StoreOptions,
    force: str | None = None,
) -> Tensor:
    """`kv_store_reference` by the kernel that `choose_store` takes."""
    problem = StoreProblem(keys.form, values.form, q.dtype, q.device.type)
    return _chosen(problem, force).run(q, k, v, keys, values, tokens, options)


def _decline(problem: StoreProblem) -> str | None:
    for name, form in (("keys", problem.keys), ("values", problem.values)):
        if form.fmt is not None and form.fmt.axis == "tokens":
            return f"stores {name} a token at a time, not with scales over groups of tokens"
    return None
