"""Which full blocks hold which tokens: a radix tree whose edges are blocks.

A node stands for the tokens from the root to it, and names the block that holds the last of them
in each kind of pool. It is entered when the step that fills the block is planned, not when it has
run: a layer stores the keys of all tokens of a step before it attends (kernels/attention_ops.py),
so requests of the same step share, too.

Blocks that no table holds are given up in the order in which they were last let go of. A table lets
go of its last block first, and holds every block before one that it holds; so among the idle blocks
of layers that see all tokens a child always stands before its parent, and the first is a leaf. For
layers with a sliding window the tree keeps nodes whose block is gone (block 0): only those within
the window before a position have to be there for a request to go on from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial

from .block_allocator import NULL_BLOCK, BlockAllocator


class Node:
    """key: the tokens of its block as bytes. blocks: one of each kind. alive: it is in the tree."""

    __slots__ = ("parent", "key", "children", "blocks", "alive")

    def __init__(self, parent: Node | None, key: bytes, blocks: list[int]) -> None:
        self.parent, self.key, self.blocks = parent, key, blocks
        self.children: dict[bytes, Node] = {}
        self.alive = True


class PrefixCache:
    """The tree over the blocks of `allocators`, one for each kind; windows: of the same kinds."""

    def __init__(
        self,
        allocators: Sequence[BlockAllocator],
        windows: Sequence[int | None],
        block_size: int,
    ) -> None:
        self.root = Node(None, b"", [NULL_BLOCK] * len(allocators))
        self.num_nodes = 0
        self._allocators, self._windows, self._block_size = allocators, windows, block_size
        for kind, allocator in enumerate(allocators):
            allocator.on_evict = partial(self._evict, kind)

    def match(self, node: Node, tokens: array[int], first: int, num_tokens: int) -> list[Node]:
        """The nodes after `node` for the blocks of `tokens` from number `first` on.

        As many as a sequence of `num_tokens` can go on from: it has the blocks before `first`, and
        computes its last token in any case. Changes nothing.
        """
        size, path = self._block_size, []
        for begin in range(first * size, num_tokens // size * size, size):
            child = node.children.get(tokens[begin : begin + size].tobytes())
            if child is None:
                break
            path.append(child)
            node = child
        windows = [(k, w) for k, w in enumerate(self._windows) if w is not None]
        longest = -1
        while path and longest != len(path):  # what suits one kind's window may not suit another's
            longest = len(path)
            for kind, window in windows:
                del path[self._within(path, kind, window, first, num_tokens) :]
        return path

    def insert(self, parent: Node, key: bytes, blocks: list[int]) -> Node:
        """A new child of `parent`, whose blocks are in use; block 0 for kinds that have passed."""
        assert parent.alive and key not in parent.children
        node = parent.children[key] = Node(parent, key, blocks)
        self.num_nodes += 1
        for allocator, block in zip(self._allocators, blocks, strict=True):
            if block != NULL_BLOCK:
                allocator.remember(block, node)
        return node

    def restore(self, node: Node, kind: int, block: int) -> None:
        """`block`, which is in use, holds what the block of `node` that was given up held."""
        assert node.alive and node.blocks[kind] == NULL_BLOCK
        node.blocks[kind] = block
        self._allocators[kind].remember(block, node)

    def forget(self, node: Node) -> None:
        """Take `node` and all below it out of the tree. Tables that hold their blocks keep them."""
        for gone in list(self._below(node)):
            for kind in range(len(self._allocators)):
                self._drop_block(gone, kind)
            gone.alive = False
            self.num_nodes -= 1
        self._prune(self._detach(node))

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, in no particular order."""
        for child in self.root.children.values():
            yield from self._below(child)

    def _within(self, path: list[Node], kind: int, window: int, first: int, num_tokens: int) -> int:
        """How many nodes of `path` a layer with this window can go on after."""
        gone, last_gone = [], -1  # the last node up to each whose block is missing
        for i, node in enumerate(path):
            if node.blocks[kind] == NULL_BLOCK:
                last_gone = i
            gone.append(last_gone)
        for count in range(len(path), 0, -1):
            position = min((first + count) * self._block_size, num_tokens - 1)
            seen_from = max(0, position - window + 1) // self._block_size - first
            if gone[count - 1] < seen_from:
                return count
        return 0

    def _evict(self, kind: int, block: int) -> None:
        """Give up an idle block, and the nodes that are of no more use without it."""
        node = self._allocators[kind].nodes[block]
        assert node is not None
        if self._windows[kind] is None:
            assert not node.children, "a block is idle, but one after it is in use or kept"
            for each in range(len(self._allocators)):
                self._drop_block(node, each)
        else:
            self._drop_block(node, kind)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Take `node` out where it holds nothing, and those before it that are of no use then."""
        while not node.children and not any(node.blocks) and node.parent is not None:
            node.alive = False
            self.num_nodes -= 1
            node = self._detach(node)

    def _drop_block(self, node: Node, kind: int) -> None:
        block, node.blocks[kind] = node.blocks[kind], NULL_BLOCK
        if block != NULL_BLOCK:
            self._allocators[kind].forget(block)

    def _detach(self, node: Node) -> Node:
        """Cut `node` off its parent, which is returned."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        return parent

    def _below(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
