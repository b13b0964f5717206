"""The blocks of all kinds of layers, as sequences take, share, fill and leave them.

Each method keeps this true: the blocks that tables name are in use as often as tables name them, a
block is written by one sequence alone, and what cannot be done is not begun.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .block_allocator import NULL_BLOCK, BlockAllocator
from .block_table import BlockTable
from .config import KVKind
from .plan import BlockCopy
from .prefix_cache import Node, PrefixCache


class KVUsage(NamedTuple):
    """Of all kinds together. blocks, blocks_in_use: of the pools. slots: of the blocks in use.
    tokens: the slots among them that hold what a later token will read."""

    blocks: int
    blocks_in_use: int
    slots: int
    tokens: int

    @property
    def waste(self) -> float:
        """The share of the slots in use that hold nothing of use."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


class BlockManager:
    """The pools of `kinds`; prefix_cache: keep full blocks for later requests."""

    def __init__(self, kinds: Sequence[KVKind], block_size: int, prefix_cache: bool) -> None:
        self.block_size = block_size
        self.windows = [kind.sliding_window for kind in kinds]
        self.budgets = [kind.budget for kind in kinds]
        self.allocators = [BlockAllocator(kind.num_blocks) for kind in kinds]
        self.prefix: PrefixCache | None = None
        if prefix_cache:
            self.prefix = PrefixCache(self.allocators, self.windows, block_size)
        self.sliding = [(k, w) for k, w in enumerate(self.windows) if w is not None]

    def new_table(self) -> BlockTable:
        return BlockTable(len(self.windows), self.prefix.root if self.prefix else None)

    def peak_blocks(self, kind: int, num_tokens: int, chunk: int = 1) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once when it runs in chunks."""
        whole = -(-num_tokens // self.block_size)
        window, budget = self.windows[kind], self.budgets[kind]
        if budget is not None:
            return min(whole, budget // self.block_size - (-chunk // self.block_size))
        if window is None:
            return whole
        return min(whole, (window + chunk + self.block_size - 3) // self.block_size + 1)

    def find(self, table: BlockTable, tokens: array[int], num_tokens: int) -> list[Node]:
        """What the prefix cache has of `tokens` after the blocks of `table`, see its `match`."""
        node = table.node
        if self.prefix is None or node is None or len(table.blocks[0]) != table.num_cached:
            return []
        return self.prefix.match(node, tokens, table.num_cached, num_tokens) if node.alive else []

    def adopt(self, table: BlockTable, path: list[Node], num_tokens: int) -> int:
        """Take over the blocks of `path`, found for `num_tokens`; the tokens that `table` now has.

        The last token is left to compute, even where its block is among those that were found.
        """
        first = table.num_cached
        table.num_cached += len(path)
        table.node = path[-1]
        computed = min(table.num_cached * self.block_size, num_tokens - 1)
        for kind, window in enumerate(self.windows):
            blocks, allocator = table.blocks[kind], self.allocators[kind]
            seen_from = 0 if window is None else max(0, computed - window + 1) // self.block_size
            for i, node in enumerate(path, first):
                if i >= seen_from:
                    allocator.share(node.blocks[kind])
                blocks.append(node.blocks[kind] if i >= seen_from else NULL_BLOCK)
            self._pass(table, kind, seen_from)
        return computed

    def reserve(self, table: BlockTable, start: int, end: int, copies: list[BlockCopy]) -> int:
        """Room for the tokens at positions start to end - 1; how many of them there was room for.

        A block that is not full and that others hold, too, is copied first: `copies` tells.
        """
        size = self.block_size
        first = start // size
        partial = start % size != 0 and first >= table.num_cached
        if partial and end <= (first + 1) * size and not self._is_shared(table, first):
            return end - start  # as most tokens of a decode
        for blocks, allocator in zip(table.blocks, self.allocators, strict=True):
            if end <= len(blocks) * size and not partial:
                continue
            spare = len(allocator.free) + len(allocator.idle)
            if partial and allocator.refs[blocks[first]] > 1:
                if not spare:
                    return 0
                spare -= 1
            end = min(end, (len(blocks) + spare) * size)
        if end <= start:
            return 0
        for kind, blocks in enumerate(table.blocks):
            allocator = self.allocators[kind]
            if partial and allocator.refs[blocks[first]] > 1:
                own = allocator.allocate()
                copies.append(BlockCopy(kind, "device", blocks[first], own))
                allocator.release(blocks[first])
                blocks[first] = own
            while len(blocks) * size < end:
                blocks.append(allocator.allocate())
        return end - start

    def commit(self, table: BlockTable, tokens: array[int], end: int) -> list[tuple[int, int]]:
        """Enter the blocks that positions before `end` fill into the prefix cache.

        Where it has one with the same tokens, the table takes that one in place of its own: the
        kinds and entries of the table for which this is so.
        """
        full = end // self.block_size
        node = table.node
        adopted: list[tuple[int, int]] = []
        if self.prefix is None or node is None or full <= table.num_cached:
            return adopted
        for i in range(table.num_cached, full):
            own = [blocks[i] for blocks in table.blocks]
            if not node.alive or not any(own):
                table.node = None
                return adopted
            key = tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()
            child = node.children.get(key)
            if child is None:
                child = self.prefix.insert(node, key, own)
                table.own_from = i if table.own_from is None else table.own_from
            else:
                adopted += [(k, i) for k in range(len(own)) if self._take_known(table, child, k, i)]
            table.node = node = child
            table.num_cached = i + 1
        return adopted

    def slide(self, table: BlockTable, position: int) -> None:
        """The next token is at `position`: let go of the blocks that no window reaches any more."""
        for kind, window in self.sliding:
            seen_from = (position - window + 1) // self.block_size
            if seen_from > table.passed[kind]:
                self._pass(table, kind, seen_from)

    def evict(self, table: BlockTable, kind: int, entries: Iterable[int]) -> None:
        """Let go of blocks that hold what no later token is to see. Not beside a prefix cache: what
        is computed from now on is not what it would mean by these tokens."""
        assert self.prefix is None
        blocks = table.blocks[kind]
        for i in entries:
            assert blocks[i] != NULL_BLOCK
            self.allocators[kind].release(blocks[i])
            blocks[i] = NULL_BLOCK
            table.evicted[kind] += 1

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table of the same blocks."""
        other = BlockTable(len(table.blocks), table.node)
        other.num_cached, other.passed = table.num_cached, table.passed[:]
        other.own_from = table.own_from
        other.evicted, other.heat = table.evicted[:], table.heat[:]
        other.blocks = [blocks[:] for blocks in table.blocks]
        for blocks, allocator in zip(other.blocks, self.allocators, strict=True):
            for block in blocks:
                if block != NULL_BLOCK:
                    allocator.share(block)
        return other

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Let go of the blocks that the first `num_tokens` do not need, the last one first; not of
        those that the prefix cache knows, of which the last token may be left to compute."""
        keep = max(-(-num_tokens // self.block_size), table.num_cached)
        for blocks, allocator in zip(table.blocks, self.allocators, strict=True):
            for block in reversed(blocks[keep:]):
                if block != NULL_BLOCK:
                    allocator.release(block)
            del blocks[keep:]

    def release(self, table: BlockTable) -> None:
        """Let go of all blocks. The table is as new."""
        table.num_cached, table.own_from = 0, None
        self.trim(table, 0)
        table.passed = [0] * len(table.passed)
        table.node = self.prefix.root if self.prefix else None
        table.evicted, table.heat = [0] * len(table.evicted), array("d")

    def disown(self, table: BlockTable) -> None:
        """What this sequence entered into the prefix cache, and all after it, is not to be used."""
        node, table.node = table.node, None
        if self.prefix is None or node is None or table.own_from is None or not node.alive:
            return
        for _ in range(table.num_cached - table.own_from - 1):
            assert node.parent is not None
            node = node.parent
        self.prefix.forget(node)

    def usage(self, tables: Iterable[tuple[BlockTable, int]]) -> KVUsage:
        """What is in use; tables: all that hold blocks, each with the tokens it has computed."""
        size, in_use = self.block_size, sum(a.in_use for a in self.allocators)
        filled: list[dict[int, int]] = [{} for _ in self.allocators]  # of blocks that are not full
        for table, computed in tables:
            for kind, window in enumerate(self.windows):
                seen_from = 0 if window is None else max(0, computed - window + 1)
                edges = {seen_from // size, *range(computed // size, len(table.blocks[kind]))}
                for i in edges:
                    block = table.blocks[kind][i] if i < len(table.blocks[kind]) else NULL_BLOCK
                    if block != NULL_BLOCK:
                        held = min(computed, (i + 1) * size) - max(seen_from, i * size)
                        filled[kind][block] = max(filled[kind].get(block, 0), held)
        empty = sum(size - min(size, n) for blocks in filled for n in blocks.values())
        total = sum(a.num_blocks for a in self.allocators)
        return KVUsage(total, in_use, in_use * size, in_use * size - empty)

    def _is_shared(self, table: BlockTable, i: int) -> bool:
        """Another table holds the block at entry i of some kind, too."""
        for blocks, allocator in zip(table.blocks, self.allocators, strict=True):
            if allocator.refs[blocks[i]] > 1:
                return True
        return False

    def _take_known(self, table: BlockTable, node: Node, kind: int, i: int) -> bool:
        """Hold the block of `node` in place of the own one at entry i; False: it has none, or this
        one, or the window is past it."""
        own, known = table.blocks[kind][i], node.blocks[kind]
        if own in (NULL_BLOCK, known):
            return False
        if known == NULL_BLOCK:
            assert self.prefix is not None
            self.prefix.restore(node, kind, own)
            return False
        self.allocators[kind].share(known)
        self.allocators[kind].release(own)
        table.blocks[kind][i] = known
        return True

    def _pass(self, table: BlockTable, kind: int, seen_from: int) -> None:
        blocks = table.blocks[kind]
        seen_from = min(seen_from, len(blocks))
        for i in range(table.passed[kind], seen_from):
            if blocks[i] != NULL_BLOCK:
                self.allocators[kind].release(blocks[i])
                blocks[i] = NULL_BLOCK
        table.passed[kind] = max(seen_from, table.passed[kind])
