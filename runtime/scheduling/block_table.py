"""Which blocks hold the tokens of one sequence, and how far the prefix cache knows them."""

from __future__ import annotations

from array import array

from .prefix_cache import Node


class BlockTable:
    """The blocks of one sequence: int32 of each kind, entry i for the tokens i * block_size on.

    passed: of each kind how many entries at its front are block 0, since the window is past them.
    node: where the sequence stands in the prefix cache; None: it enters no more blocks there.
    num_cached: its leading blocks that are in the prefix cache. own_from: the first block that it
    entered itself; those before came from others. evicted: of each kind, how many entries are block
    0 since they were let go of. heat: of each entry, how much it was attended to, where that is
    known.
    """

    __slots__ = ("blocks", "passed", "node", "num_cached", "own_from", "evicted", "heat")

    def __init__(self, num_kinds: int, node: Node | None) -> None:
        self.blocks = [array("i") for _ in range(num_kinds)]
        self.passed = [0] * num_kinds
        self.node = node
        self.num_cached = 0
        self.own_from: int | None = None
        self.evicted = [0] * num_kinds
        self.heat = array("d")
