"""The prefix cache against a plain model: a set of prefixes with a list of those nobody holds.

pytest -m slow tests/test_prefix_cache.py     # 100,000 random operations
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from lowbit.runtime.scheduling.block_allocator import BlockAllocator
from lowbit.runtime.scheduling.block_manager import BlockManager
from lowbit.runtime.scheduling.block_table import BlockTable
from lowbit.runtime.scheduling.config import KVKind
from lowbit.runtime.scheduling.integrity import check_blocks
from lowbit.runtime.scheduling.prefix_cache import Node, PrefixCache

from .test_block_manager import Counted, run_machine

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
Prefix = tuple[int, ...]


class Prefixes(Counted):
    """Requests come whole and leave whole. Of each kind, `idle` lists the prefixes whose last block
    nobody holds, the one to go first at the front; `holders` says who holds the others."""

    @initialize(window=st.sampled_from([None, 3, 5]), num_blocks=st.integers(2, 9))
    def make(self, window: int | None, num_blocks: int) -> None:
        self.windows: list[int | None] = [None] if window is None else [None, window]
        self.num_blocks = num_blocks
        self.blocks = BlockManager([KVKind(num_blocks, w) for w in self.windows], SIZE, True)
        self.tables: list[tuple[BlockTable, array[int], list[list[Prefix | None]]]] = []
        self.idle: list[list[Prefix]] = [[] for _ in self.windows]
        self.holders: list[dict[Prefix, int]] = [{} for _ in self.windows]
        self.private = [0 for _ in self.windows]

    @rule(tokens=TOKENS)
    def come(self, tokens: list[int]) -> None:
        ids, table = array("i", tokens), self.blocks.new_table()
        path = self.blocks.find(table, ids, len(ids))
        found = self._longest(tokens)
        assert [self._prefix(n) for n in path] == [tuple(tokens[: SIZE * (i + 1)])
                                                  for i in range(found)]  # fmt: skip
        computed = self.blocks.adopt(table, path, len(ids)) if path else 0
        held = [self._take(kind, tokens, found, computed) for kind in range(len(self.windows))]
        whole = -(-len(tokens) // SIZE)
        room = all(
            whole - found <= self.num_blocks - len(h) - self.private[kind]
            for kind, h in enumerate(self.holders)
        )
        if not room:
            self.blocks.release(table)
            self._let_go(held)
            return
        assert self.blocks.reserve(table, computed, len(ids), []) == len(ids) - computed
        for kind in range(len(self.windows)):
            for _ in range(whole - found):
                self._evict_for_one(kind)
                self.private[kind] += 1
        self.blocks.commit(table, ids, len(ids))
        for kind in range(len(self.windows)):
            for i in range(found, len(tokens) // SIZE):
                prefix = tuple(tokens[: SIZE * (i + 1)])
                self.private[kind] -= 1
                self._hold(kind, prefix)
                held[kind].append(prefix)
            if len(tokens) // SIZE < whole:
                held[kind].append(None)
        self.tables.append((table, ids, held))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        table, _, held = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.blocks.release(table)
        self._let_go(held)

    @rule(tokens=TOKENS)
    def look(self, tokens: list[int]) -> None:
        """Changes nothing, and finds what the model knows."""
        path = self.blocks.find(self.blocks.new_table(), array("i", tokens), len(tokens))
        assert len(path) == self._longest(tokens)

    @invariant()
    def the_tree_is_the_model(self) -> None:
        if not hasattr(self, "tables"):
            return
        check_blocks(self.blocks, [t for t, _, _ in self.tables])
        assert self.blocks.prefix is not None
        for kind, allocator in enumerate(self.blocks.allocators):
            order = [self._prefix(allocator.nodes[block]) for block in allocator.idle]
            assert order == self.idle[kind]
            there = {self._prefix(node) for node in self.blocks.prefix.nodes() if node.blocks[kind]}
            assert there == {*self.idle[kind], *self.holders[kind]}
            assert len(allocator.free) == self._free(kind)

    def _free(self, kind: int) -> int:
        known = len(self.idle[kind]) + len(self.holders[kind])
        return self.num_blocks - known - self.private[kind]

    def _longest(self, tokens: list[int]) -> int:
        """The most blocks after which a request can go on, tried one number after another."""
        known = [{*idle, *held} for idle, held in zip(self.idle, self.holders, strict=True)]
        best = 0
        for count in range(1, len(tokens) // SIZE + 1):
            if tuple(tokens[: SIZE * count]) not in known[0]:
                break
            position = min(SIZE * count, len(tokens) - 1)
            if all(
                tuple(tokens[: SIZE * (j // SIZE + 1)]) in known[kind]
                for kind, window in enumerate(self.windows)
                for j in range(max(0, position - window + 1) if window else 0, SIZE * count)
            ):
                best = count
        return best

    def _take(self, kind: int, tokens: list[int], found: int, computed: int) -> list[Prefix | None]:
        window, held = self.windows[kind], []
        for i in range(found):
            if window is None or SIZE * (i + 1) > computed - window + 1:
                prefix = tuple(tokens[: SIZE * (i + 1)])
                self._hold(kind, prefix)
                held.append(prefix)
        return held

    def _hold(self, kind: int, prefix: Prefix) -> None:
        if prefix in self.idle[kind]:
            self.idle[kind].remove(prefix)
        self.holders[kind][prefix] = self.holders[kind].get(prefix, 0) + 1

    def _let_go(self, held: list[list[Prefix | None]]) -> None:
        for kind, prefixes in enumerate(held):
            for prefix in reversed(prefixes):
                if prefix is None:
                    self.private[kind] -= 1
                    continue
                self.holders[kind][prefix] -= 1
                if not self.holders[kind][prefix]:
                    del self.holders[kind][prefix]
                    self.idle[kind].append(prefix)

    def _evict_for_one(self, kind: int) -> None:
        if self._free(kind):
            return
        gone = self.idle[kind].pop(0)
        if self.windows[kind] is None:
            longer = [p for p in self.holders[kind] | dict.fromkeys(self.idle[kind])
                      if p[: len(gone)] == gone]  # fmt: skip
            assert not longer, "a prefix is given up before one that goes on from it"
            for other in self.idle:
                if gone in other:
                    other.remove(gone)

    def _prefix(self, node: Node | None) -> Prefix:
        tokens: Prefix = ()
        while node is not None:
            tokens, node = (*array("i", node.key), *tokens), node.parent
        return tokens


def test_the_prefix_cache_is_the_plain_model() -> None:
    assert run_machine(Prefixes, 50, 30) > 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_prefix_cache_is_the_plain_model_for_100_000_operations() -> None:
    assert run_machine(Prefixes, 2700, 50) > 100_000


def windowed(*blocks: tuple[int, int]) -> tuple[PrefixCache, list[Node]]:
    """A cache for windows of 2 and 9 whose only path has nodes of these blocks, 0 where none is
    left, for the tokens 0, 1, 2, ..."""
    cache = PrefixCache([BlockAllocator(9), BlockAllocator(9)], [2, 9], SIZE)
    node, nodes = cache.root, []
    for i, held in enumerate(blocks):
        for allocator, block in zip(cache._allocators, held, strict=True):
            allocator.refs[block] = int(block > 0)
        key = array("i", range(SIZE * i, SIZE * i + SIZE)).tobytes()
        nodes.append(node := cache.insert(node, key, list(held)))
    return cache, nodes


def test_what_one_window_leaves_of_a_path_is_looked_at_by_the_others_again() -> None:
    """The wide window can go on after three blocks, where the narrow one lacks its last."""
    tokens = array("i", range(9))
    cache, nodes = windowed((1, 1), (2, 2), (0, 3), (4, 0))
    assert cache.match(cache.root, tokens, 0, 9) == nodes[:2]
    cache, nodes = windowed((1, 1), (2, 2), (0, 3), (4, 4))
    assert cache.match(cache.root, tokens, 0, 9) == nodes


def test_nodes_without_blocks_go_with_the_last_one_behind_them() -> None:
    cache, nodes = windowed((1, 1), (0, 0), (0, 0), (4, 4))
    cache.forget(nodes[3])
    assert list(cache.nodes()) == nodes[:1] and cache.num_nodes == 1
    assert [node.alive for node in nodes] == [True, False, False, False]
