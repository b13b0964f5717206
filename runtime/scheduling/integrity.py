"""That every block is accounted for: what must be true of a scheduler between any two calls.

For tests, which call it after every step. An AssertionError says what is not so.
"""

from __future__ import annotations

from collections import Counter

from .block_allocator import NULL_BLOCK, BlockAllocator
from .block_manager import BlockManager
from .block_table import BlockTable
from .prefix_cache import PrefixCache
from .roster import Roster
from .scheduler import Scheduler
from .sequence import RequestStatus, Sequence


def check_scheduler(scheduler: Scheduler) -> None:
    """All of it: pools, prefix cache, host memory, tables, and who is where."""
    roster = scheduler.roster
    holders = roster.holders()
    check_blocks(scheduler.blocks, [s.table for s in holders])
    for sequence in holders:
        _check_sequence(scheduler.blocks, sequence)
    _check_host(roster)
    running, requests = roster.running, roster.requests.values()
    assert running == sorted(running, key=lambda r: r.order), "running requests out of order"
    assert all(r.status is RequestStatus.RUNNING for r in running)
    assert sum(r.n for r in running) <= scheduler.config.max_num_seqs, "more than max_num_seqs"
    waiting = [r for r in requests if r.status is not RequestStatus.RUNNING]
    assert len(waiting) == len(roster.waiting) and len(running) + len(waiting) == len(requests)
    assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting)


def check_blocks(blocks: BlockManager, tables: list[BlockTable]) -> None:
    """Pools and prefix cache; tables: all that there are."""
    for kind, allocator in enumerate(blocks.allocators):
        _check_pool(kind, allocator, Counter(b for t in tables for b in t.blocks[kind]))
    if blocks.prefix is not None:
        _check_tree(blocks, blocks.prefix)
    for table in tables:
        lengths = {len(b) for b in table.blocks}
        assert len(lengths) == 1, f"the tables of a sequence differ in length: {lengths}"
        if blocks.prefix is not None and table.node is not None and table.node.alive:
            _check_path(blocks, blocks.prefix, table)


def _check_pool(kind: int, allocator: BlockAllocator, held: Counter[int]) -> None:
    where = f"pool {kind}"
    free, idle = set(allocator.free), set(allocator.idle)
    assert len(free) == len(allocator.free), f"{where}: a block is free twice"
    assert not free & idle, f"{where}: blocks both free and idle: {free & idle}"
    assert NULL_BLOCK not in free | idle and not allocator.refs[NULL_BLOCK]
    for block in range(1, allocator.num_blocks + 1):
        refs, known = allocator.refs[block], allocator.nodes[block] is not None
        assert refs == held[block], f"{where}: block {block} has {refs} refs, is in {held[block]}"
        state = (block in free, block in idle, refs > 0)
        assert sum(state) == 1, f"{where}: block {block} is free, idle, in use: {state}"
        assert not (block in free and known), f"{where}: free block {block} is in the prefix cache"
        assert block not in idle or known, f"{where}: idle block {block} is not in it"
    assert allocator.available + allocator.in_use == allocator.num_blocks


def _check_tree(blocks: BlockManager, prefix: PrefixCache) -> None:
    nodes = list(prefix.nodes())
    assert len(nodes) == prefix.num_nodes
    for node in nodes:
        assert node.alive and node.parent is not None and node.parent.children[node.key] is node
        assert any(node.blocks) or node.children, "a leaf of the prefix cache holds no block"
    for kind, allocator in enumerate(blocks.allocators):
        held = {n.blocks[kind]: n for n in nodes if n.blocks[kind] != NULL_BLOCK}
        known = {b: n for b, n in enumerate(allocator.nodes) if n is not None}
        assert held == known, f"pool {kind} and the prefix cache disagree"
        if blocks.windows[kind] is None:
            assert len(held) == len(nodes), f"pool {kind}: a node has no block"


def _check_path(blocks: BlockManager, prefix: PrefixCache, table: BlockTable) -> None:
    """The blocks of `table` that are in the prefix cache are those on the way to its node."""
    node = table.node
    for i in reversed(range(table.num_cached)):
        assert node is not None
        for held, known in zip(table.blocks, node.blocks, strict=True):
            assert held[i] in (known, NULL_BLOCK), f"entry {i} is not the block of its node"
        node = node.parent
    assert node is prefix.root


def _check_sequence(blocks: BlockManager, sequence: Sequence) -> None:
    """Its tables name a block for every token that it has computed and can still see."""
    computed = 0 if sequence.host_blocks is not None else sequence.num_computed
    size = blocks.block_size
    for kind, window in enumerate(blocks.windows):
        table = sequence.table.blocks[kind]
        seen_from = 0 if window is None else max(0, computed - window + 1)
        assert len(table) * size >= computed, "computed tokens without a block"
        missing = [i for i in range(seen_from // size, len(table)) if table[i] == NULL_BLOCK]
        assert len(missing) == sequence.table.evicted[kind], (
            f"entries {missing} of kind {kind} are block 0 within the window"
        )
        passed = sequence.table.passed[kind]
        assert not any(table[:passed]), "blocks are held that the window has passed"
        assert window is not None or not passed


def _check_host(roster: Roster) -> None:
    for kind, (free, total) in enumerate(
        zip(roster.host.free, roster.host.num_blocks, strict=True)
    ):
        held: list[int] = []
        for request in {id(s.request): s.request for s in roster.holders()}.values():
            tables = [s.host_blocks[kind] for s in request.sequences if s.host_blocks is not None]
            held += {b for t in tables for b in t if b != NULL_BLOCK}
        assert sorted(held + free) == list(range(1, total + 1)), f"host pool {kind} leaks"
