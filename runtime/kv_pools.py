"""The pools of keys and values of all layers, and how many blocks fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..kernels.errors import UserError
from ..kernels.kv_quant import KVFormat
from ..kernels.paged_kv import BlockPool, new_pool
from ..quantize.checkpoint.kv_config import KVStorage
from .kv_formats import kv_format, layer_kv
from .models.decoder import DecoderLayer, KVPools
from .models.hf_module import ModuleLayer
from .scheduling.plan import BlockCopy


def decline_paged(kv: KVStorage | None) -> str | None:
    """None, or why the paged engine cannot keep keys and values so."""
    if kv is None:
        return None
    if kv.spec.key_before_rope:
        return "stores no keys as before their rotary embedding"
    axes = {kv_format(part, False, 0).axis for part in (kv.spec.key, kv.spec.value) if part}
    return (
        "stores a token at a time, not with scales over groups of tokens"
        if "tokens" in axes
        else None
    )


def layer_pools(
    index: int,
    layer: DecoderLayer | ModuleLayer,
    blocks: int,
    block_size: int,
    kv: KVStorage | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KVPools:
    """Empty pools of layer number `index`; dtype: of what is not quantized. UserError where the
    format does not suit its heads or lacks its scales."""
    like = torch.empty(0, layer.kv_heads, 0, layer.head_dim, device=device)
    stored = None if kv is None else layer_kv(kv, index, like, like)

    def pool(fmt: KVFormat | None, scale: torch.Tensor | None) -> BlockPool:
        return new_pool(
            blocks, layer.kv_heads, block_size, layer.head_dim, fmt, dtype, device, scale
        )

    if stored is None:
        return KVPools(pool(None, None), pool(None, None))
    return KVPools(pool(stored.key, stored.scales.key), pool(stored.value, stored.scales.value))


def copy_blocks(
    pools: Sequence[KVPools], kinds: Sequence[int], copies: Iterable[BlockCopy]
) -> None:
    """Carry out the copies of a plan within the pools. kinds: of each layer."""
    for copy in copies:
        if copy.direction != "device":
            raise UserError("blocks are not swapped to host memory yet: recompute them instead")
        for pool, kind in zip(pools, kinds, strict=True):
            if kind != copy.kind:
                continue
            for part in (part for of in pool for part in (of.codes, of.scale, of.offset)):
                if part is not None:
                    part[copy.target].copy_(part[copy.source])


def wipe_blocks(
    pools: Sequence[KVPools], kinds: Sequence[int], kind: int, blocks: Sequence[int]
) -> None:
    """Zeros in these blocks of every layer of `kind`. kinds: of each layer."""
    for pool, own in zip(pools, kinds, strict=True):
        if own == kind:
            for part in (part for of in pool for part in (of.codes, of.scale, of.offset)):
                if part is not None:
                    part[list(blocks)] = 0
