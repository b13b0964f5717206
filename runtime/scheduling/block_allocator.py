"""Which blocks of one pool are free, in use or kept for their content: lists of ints.

A block is in one of three states. *In use*: `refs` block tables hold it. *Idle*: no table does, but
the prefix cache knows its content and may hand it out again. *Free*: neither. Idle blocks are given
up, least recently used first, when no free one is left; so the cache costs no request its memory.

Block 0 belongs to nobody. Tables name it where a sliding window has passed, padded rows where there
is no token; so a kernel that reads a table entry always finds a block, and never someone else's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prefix_cache import Node

NULL_BLOCK = 0


class BlockAllocator:
    """The blocks 1 to `num_blocks` of a pool.

    refs: tables that hold each block. nodes: the place of each in the prefix cache, or None. idle:
    least recently used first. on_evict: called with an idle block that is to be given up; it must
    call `forget` for it.
    """

    __slots__ = ("num_blocks", "refs", "nodes", "idle", "free", "on_evict")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * (num_blocks + 1)
        self.nodes: list[Node | None] = [None] * (num_blocks + 1)
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.free = list(range(num_blocks, NULL_BLOCK, -1))
        self.on_evict: Callable[[int], None] | None = None

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self.free) + len(self.idle)

    @property
    def in_use(self) -> int:
        return self.num_blocks - len(self.free) - len(self.idle)

    def allocate(self) -> int:
        """A block of no defined content, held once. Only where `available` says that there is."""
        if not self.free:
            assert self.on_evict is not None
            self.on_evict(next(iter(self.idle)))
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds `block`, which is in use or idle."""
        if not self.refs[block]:
            del self.idle[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """One table fewer holds `block`."""
        refs = self.refs[block] - 1
        assert refs >= 0, f"block {block} is released more often than it was held"
        self.refs[block] = refs
        if not refs:
            if self.nodes[block] is None:
                self.free.append(block)
            else:
                self.idle[block] = None

    def remember(self, block: int, node: Node) -> None:
        """The prefix cache knows the content of `block`, which is in use."""
        assert self.refs[block] and self.nodes[block] is None
        self.nodes[block] = node

    def forget(self, block: int) -> None:
        """The prefix cache knows the content of `block` no more."""
        self.nodes[block] = None
        if not self.refs[block]:
            del self.idle[block]
            self.free.append(block)
