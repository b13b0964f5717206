"""Cases of the store: queries turned, keys and values kept in every form."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kv_store_ops import HeadNorm, NewTokens, StoreOptions, kv_store_reference
from ..rotary import Rotary
from ..triton_ops.kv_store import kv_store
from .case import Case, Maker, Operands, Size
from .pools import PoolShape, empty_pool


def cases(size: Size) -> Iterator[Case]:
    for form in ("dense", "int8", "fp8", "int4", "int4_g32"):
        for head_dim in (64, 128):
            tokens, heads = (32, 4) if size == "small" else (2048, 32)
            dtype = torch.float16 if size == "small" else torch.bfloat16
            pool = PoolShape(form, 1, tokens, heads // 4, head_dim, dtype)
            yield _case(pool, heads, f"{form} D={head_dim}", form == "int4" and head_dim == 128)


def _case(s: PoolShape, heads: int, name: str, ci: bool) -> Case:
    def make(maker: Maker) -> Operands:
        shape = (s.context, heads + 2 * s.kv_heads, s.head_dim)
        angles = maker.uniform(s.context, s.head_dim // 2, low=0.0, high=6.0)
        place = torch.arange(s.context, device=maker.device)
        return {
            "qkv": maker.normal(*shape, dtype=s.dtype),
            "cos": angles.cos(),
            "sin": angles.sin(),
            "weights": maker.uniform(2, s.head_dim, low=0.5, high=1.5, dtype=s.dtype),
            "positions": place,
            "slots": place.flip(0),
        }

    def run(o: Operands) -> tuple[Tensor, ...]:
        return _stored(kv_store, o, s, heads)

    def reference(o: Operands) -> tuple[Tensor, ...]:
        return _stored(kv_store_reference, o, s, heads)

    # two sums in another order may lie on either side of the border between two codes
    return Case("kv_store", name, make, run, reference, 2e-2, ci=ci)


def _stored(store, o: Operands, s: PoolShape, heads: int) -> tuple[Tensor, ...]:
    """Queries; codes, scales and offsets of keys, of values."""
    qkv, cos, sin, weights, positions, slots = (
        o[name] for name in ("qkv", "cos", "sin", "weights", "positions", "slots")
    )
    assert qkv is not None and cos is not None and sin is not None and weights is not None
    assert positions is not None and slots is not None
    keys, values = empty_pool(s, qkv.device), empty_pool(s, qkv.device)
    options = StoreOptions(Rotary(cos, sin), HeadNorm(weights[0], weights[1], 1e-5), True)
    q, k, v = qkv.split([heads, s.kv_heads, s.kv_heads], 1)
    turned = store(q, k, v, keys, values, NewTokens(positions, slots), options)
    parts = (part for pool in (keys, values) for part in (pool.codes, pool.scale, pool.offset))
    return turned, *(part for part in parts if part is not None)
