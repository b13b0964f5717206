"""The pools of keys and values of all layers, and how many blocks fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..kernels.errors import UserError
from ..kernels.kv_quant import KVFormat
from ..kernels.paged_kv import BlockPool, new_pair, new_pool
from ..quantize.checkpoint.kv_config import KVStorage
from ..quantize.planning.machine import available_bytes
from .kv_formats import kv_format, layer_kv
from .models.decoder import DecoderLayer, KVPools
from .models.hf_module import ModuleLayer
from .scheduling.config import BLOCK_SIZE
from .scheduling.plan import BlockCopy

MEMORY_SHARE = 0.25  # of the free memory that the pools may grow to where nothing is said
UNKNOWN_MEMORY = 1 << 30  # is taken to be free where the system does not tell


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
        return KVPools(*new_pair(blocks, layer.kv_heads, block_size, layer.head_dim, dtype, device))
    return KVPools(pool(stored.key, stored.scales.key), pool(stored.value, stored.scales.value))


class PagedKV:
    """The pools of all layers of a model, and beside them, in host memory, room for blocks of
    requests that wait. kinds: of each layer, the number of its kind."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer | ModuleLayer],
        kinds: Sequence[int],
        kv: KVStorage | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers, self._kinds, self._kv = layers, kinds, kv
        self._dtype, self._device = dtype, device
        self.pools: list[KVPools] = []
        self.host: list[KVPools] = []

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return sum(pool.nbytes for pools in self._new(1, "meta") for pool in pools)

    @property
    def nbytes(self) -> int:
        """Of all pools on the device."""
        return sum(pool.nbytes for pools in self.pools for pool in pools)

    def allocate(self, blocks: int, host_blocks: int) -> None:
        """Memory for so many blocks that hold tokens, and one that is nobody's."""
        self.pools = self._new(blocks + 1, self._device)
        self.host = self._new(host_blocks + 1, "cpu") if host_blocks else []
        if self._device.type != "cpu":
            self.host = [KVPools(*(_pinned(pool) for pool in pools)) for pools in self.host]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out the copies of a plan."""
        for (kind, direction), same in itertools.groupby(copies, lambda c: (c.kind, c.direction)):
            pairs = [(copy.source, copy.target) for copy in same]
            sources, targets = (list(numbers) for numbers in zip(*pairs, strict=True))
            read = self.host if direction == "in" else self.pools
            written = self.host if direction == "out" else self.pools
            for source, target in zip(_parts(read, self._kinds, kind),
                                      _parts(written, self._kinds, kind), strict=True):  # fmt: skip
                target[targets] = source[sources].to(target.device)

    def wipe(self, kind: int, blocks: Sequence[int]) -> None:
        """Zeros in these blocks of every layer of `kind`."""
        for part in _parts(self.pools, self._kinds, kind):
            part[list(blocks)] = 0

    def _new(self, blocks: int, device: torch.device | str) -> list[KVPools]:
        return [
            layer_pools(index, layer, blocks, BLOCK_SIZE, self._kv, self._dtype, device)
            for index, layer in enumerate(self._layers)
        ]


def _parts(pools: Sequence[KVPools], kinds: Sequence[int], kind: int) -> list[torch.Tensor]:
    """What layers of `kind` keep by blocks."""
    return [
        part
        for layer, own in zip(pools, kinds, strict=True)
        if own == kind
        for pool in layer
        for part in (pool.codes, pool.scale, pool.offset)
        if part is not None
    ]


def _pinned(pool: BlockPool) -> BlockPool:
    parts = {"codes": pool.codes, "scale": pool.scale, "offset": pool.offset}
    pinned = {k: part.pin_memory() for k, part in parts.items() if part is not None}
    return replace(pool, **pinned, pair=None)


def blocks_in(memory: int | None, most: int, block_bytes: int, device: torch.device) -> int:
    """Blocks that hold tokens in `memory` bytes; None: a quarter of what is free, `most` at most.

    UserError where there is less, or no room for one of them.
    """
    free = _free_memory(device)
    if memory is None:
        memory = int((free or UNKNOWN_MEMORY) * MEMORY_SHARE)
        memory = min(memory, (most + 1) * block_bytes)
    elif free is not None and memory > free:
        raise UserError(
            f"kv_memory asks for {memory:,} bytes for keys and values, and {free:,} are free: "
            "ask for less, or leave it out"
        )
    blocks = memory // block_bytes - 1  # one is nobody's
    if blocks < 1:
        raise UserError(
            f"the memory for keys and values, {memory:,} bytes, holds no more than one block "
            f"of {BLOCK_SIZE} tokens, which takes {block_bytes:,}: give it more"
        )
    return blocks


def kv_memory_within(share: float, device: torch.device) -> int:
    """Bytes for keys and values with which `share` of the device's memory is in use, by whatever
    process. UserError where there is no such device, and where more is in use already."""
    if not 0 < share <= 1:
        raise UserError(f"gpu_memory_utilization must be above 0 and at most 1, got {share:g}")
    if device.type != "cuda":
        raise UserError(
            f"gpu_memory_utilization is of a GPU's memory, and the model is on {device}: take "
            "kv_memory"
        )
    free, total = torch.cuda.mem_get_info(device)
    memory = int(share * total) - (total - free)
    if memory <= 0:
        raise UserError(
            f"gpu_memory_utilization {share:g} of {total:,} bytes leaves nothing for keys and "
            f"values: {total - free:,} are in use already"
        )
    return memory


def host_blocks_in(memory: int, block_bytes: int) -> int:
    """Blocks in `memory` bytes of the host; 0: none are asked for. UserError as `blocks_in`."""
    if memory == 0:
        return 0
    free = available_bytes()
    if memory < 0 or (free is not None and memory > free):
        raise UserError(
            f"swap_memory must be from 0 to the {free or UNKNOWN_MEMORY:,} bytes that are free, "
            f"got {memory:,}"
        )
    blocks = memory // block_bytes - 1
    if blocks < 1:
        raise UserError(
            f"swap_memory, {memory:,} bytes, holds no block of {BLOCK_SIZE} tokens, which takes "
            f"{block_bytes:,} and as much that is nobody's: give it more, or 0"
        )
    return blocks


def _free_memory(device: torch.device) -> int | None:
    """None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
