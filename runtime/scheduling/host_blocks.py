"""Room in host memory for blocks of preempted requests: which copies take them there and back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from .block_allocator import NULL_BLOCK
from .block_manager import BlockManager
from .plan import BlockCopy
from .sequence import RequestState, Sequence


class HostBlocks:
    """The host blocks of each kind, numbered from 1 on; a block that the continuations of a request
    share is copied once, and they share it again afterwards."""

    def __init__(self, num_blocks: Seq[int]) -> None:
        self.num_blocks = list(num_blocks)
        self.free = [list(range(n, 0, -1)) for n in num_blocks]

    def swap_out(
        self, request: RequestState, blocks: BlockManager, copies: list[BlockCopy]
    ) -> bool:
        """Move what `request` has computed to host memory; False, and nothing done, where there is
        not enough room."""
        live = request.live
        for sequence in live:
            blocks.trim(sequence.table, sequence.num_computed)
        held = [_distinct([s.table.blocks[kind] for s in live]) for kind in range(len(self.free))]
        if any(len(h) > len(free) for h, free in zip(held, self.free, strict=True)):
            return False
        places: list[dict[int, int]] = []
        for kind, (device_blocks, free) in enumerate(zip(held, self.free, strict=True)):
            places.append({block: free.pop() for block in device_blocks})
            copies += [BlockCopy(kind, "out", *pair) for pair in places[kind].items()]
        for sequence in live:
            sequence.host_blocks = [
                array("i", (places[kind].get(block, NULL_BLOCK) for block in table))
                for kind, table in enumerate(sequence.table.blocks)
            ]
            blocks.release(sequence.table)
        return True

    def swap_in(self, request: RequestState, blocks: BlockManager, copies: list[BlockCopy]) -> None:
        """The way back, into blocks of which there must be enough; what the prefix cache still has
        is taken from there."""
        places: list[dict[int, int]] = [{} for _ in self.free]  # from host to device
        for sequence in request.live:
            assert sequence.host_blocks is not None
            table = sequence.table
            if blocks.prefix is None:
                table.evicted = [
                    0 if window else host.count(NULL_BLOCK)
                    for window, host in zip(blocks.windows, sequence.host_blocks, strict=True)
                ]
            elif request.reuse_prefix:
                known = sequence.num_computed + 1
                if path := blocks.find(table, sequence.tokens, known):
                    blocks.adopt(table, path, known)
            for kind, host in enumerate(sequence.host_blocks):
                allocator = blocks.allocators[kind]
                for block in host[len(table.blocks[kind]) :]:
                    if block == NULL_BLOCK:
                        table.blocks[kind].append(NULL_BLOCK)
                    elif block in places[kind]:
                        allocator.share(places[kind][block])
                        table.blocks[kind].append(places[kind][block])
                    else:
                        place = places[kind][block] = allocator.allocate()
                        copies.append(BlockCopy(kind, "in", block, place))
                        table.blocks[kind].append(place)
        self.drop(request)

    def held_by(self, request: RequestState, kind: int) -> int:
        """Host blocks that `request` holds."""
        return len(_distinct(_tables(request.live, kind)))

    def drop(self, request: RequestState) -> None:
        """Free the host blocks of `request`, all of its continuations at once."""
        self.keep(request, [])
        for sequence in request.sequences:
            sequence.host_blocks = None

    def keep(self, request: RequestState, sequences: list[Sequence]) -> None:
        """Free the host blocks of `request` that none of `sequences` holds."""
        for kind, free in enumerate(self.free):
            kept = set(_distinct(_tables(sequences, kind)))
            free += [b for b in _distinct(_tables(request.sequences, kind)) if b not in kept]


def _tables(sequences: list[Sequence], kind: int) -> list[array[int]]:
    return [s.host_blocks[kind] for s in sequences if s.host_blocks is not None]


def _distinct(tables: list[array[int]]) -> list[int]:
    """The blocks of `tables`, each once, in order; without block 0."""
    return [block for block in dict.fromkeys(b for t in tables for b in t) if block != NULL_BLOCK]
