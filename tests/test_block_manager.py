"""Blocks against a plain model: what is stored where, who holds it, and that nothing leaks.

pytest -m slow tests/test_block_manager.py     # 100,000 random operations
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lowbit.runtime.scheduling.block_manager import BlockManager
from lowbit.runtime.scheduling.block_table import BlockTable
from lowbit.runtime.scheduling.config import KVKind
from lowbit.runtime.scheduling.integrity import check_blocks
from lowbit.runtime.scheduling.plan import BlockCopy

from .fake_runner import prefix_hashes

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
KINDS = [(None,), (3,), (None, 4), (None, 1, 6)]


class Held:
    """One sequence: its table, its tokens, and how many of them are in blocks."""

    def __init__(self, table: BlockTable, tokens: list[int], computed: int) -> None:
        self.table, self.tokens, self.computed = table, array("i", tokens), computed


class Counted(RuleBasedStateMachine):
    """Counts its operations, so that a test can say how many there were."""

    operations = 0

    @invariant()
    def count(self) -> None:
        type(self).operations += 1


class Blocks(Counted):
    """Sequences that grow, part, take proposals back and leave; a memory of prefix hashes."""

    @initialize(
        windows=st.sampled_from(KINDS),
        num_blocks=st.integers(3, 12),
        size=st.integers(1, 3),
        prefix=st.booleans(),
    )
    def make(self, windows: tuple[int | None, ...], num_blocks: int, size: int, prefix: bool):
        kinds = [KVKind(num_blocks + 2 * i, window) for i, window in enumerate(windows)]
        self.blocks = BlockManager(kinds, size, prefix)
        self.memory: list[dict[int, int]] = [{} for _ in kinds]
        self.held: list[Held] = []
        self.size = size

    @precondition(lambda self: len(self.held) < 5)
    @rule(tokens=TOKENS)
    def start(self, tokens: list[int]) -> None:
        held = Held(self.blocks.new_table(), tokens, 0)
        if path := self.blocks.find(held.table, held.tokens, len(tokens)):
            held.computed = self.blocks.adopt(held.table, path, len(tokens))
            assert held.computed < len(tokens), "the last token is left to compute"
        self.held.append(held)
        self._check(held, held.computed)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), new=TOKENS, rejected=st.integers(0, 2))
    def grow(self, data: st.DataObject, new: list[int], rejected: int) -> None:
        """Compute what is known and some more, of which the last ones may be taken back."""
        held = self._one(data)
        if held.computed == len(held.tokens):
            held.tokens.extend(new)
        start, known = held.computed, len(held.tokens)
        proposed = [*held.tokens, *[0] * rejected]
        self.blocks.slide(held.table, start)
        copies: list[BlockCopy] = []
        before = [a.available for a in self.blocks.allocators]
        wanted = len(proposed) - start
        granted = self.blocks.reserve(held.table, start, len(proposed), copies)
        assert 0 <= granted <= wanted
        if granted < wanted:
            assert any(a.available == 0 for a in self.blocks.allocators) or not granted
        if not granted:
            assert before == [a.available for a in self.blocks.allocators], "nothing is begun"
            return
        self._copy(copies)
        end, stored = start + granted, held.table.num_cached * self.size
        adopted = set(self.blocks.commit(held.table, held.tokens, min(end, known)))
        hashes = prefix_hashes(proposed)
        for kind, memory in enumerate(self.memory):
            for position in range(max(start, stored), end):
                entry = position // self.size
                if (kind, entry) not in adopted:
                    block = held.table.blocks[kind][entry]
                    assert self.blocks.allocators[kind].refs[block] == 1, "written while shared"
                    memory[block * self.size + position % self.size] = hashes[position]
        held.computed = min(end, known)
        self._check(held, start)

    @precondition(lambda self: 0 < len(self.held) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        held = self._one(data)
        self.blocks.trim(held.table, held.computed)
        self.held.append(Held(self.blocks.fork(held.table), held.tokens.tolist(), held.computed))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        held = self._one(data)
        self.held.remove(held)
        self.blocks.commit(held.table, held.tokens, held.computed)
        self.blocks.release(held.table)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """What it entered into the prefix cache is not found again."""
        held = self._one(data)
        self.held.remove(held)
        table, own = held.table, held.table.own_from
        alive = table.node is not None and table.node.alive
        self.blocks.disown(table)
        if own is not None and alive:
            fresh = self.blocks.new_table()
            assert len(self.blocks.find(fresh, held.tokens, len(held.tokens))) <= own
        self.blocks.release(table)

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "held"):
            check_blocks(self.blocks, [h.table for h in self.held])
            usage = self.blocks.usage((h.table, h.computed) for h in self.held)
            assert 0 <= usage.tokens <= usage.slots <= usage.blocks * self.size

    def teardown(self) -> None:
        for held in getattr(self, "held", []):
            self.blocks.release(held.table)
        if hasattr(self, "held"):
            check_blocks(self.blocks, [])
            assert all(a.available == a.num_blocks for a in self.blocks.allocators)

    def _one(self, data: st.DataObject) -> Held:
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    def _copy(self, copies: list[BlockCopy]) -> None:
        for kind, direction, source, target in copies:
            assert direction == "device"
            for i in range(self.size):
                memory = self.memory[kind]
                memory[target * self.size + i] = memory.get(source * self.size + i, -1)

    def _check(self, held: Held, start: int) -> None:
        """All that tokens from position `start` on can see is there, and of the right prefix."""
        hashes = prefix_hashes(held.tokens)
        for kind, window in enumerate(self.blocks.windows):
            table = held.table.blocks[kind]
            for j in range(max(0, start - window + 1) if window else 0, held.computed):
                slot = table[j // self.size] * self.size + j % self.size
                assert self.memory[kind].get(slot) == hashes[j]


def test_a_block_whose_last_token_is_left_to_compute_is_kept_by_who_parts_before() -> None:
    blocks = BlockManager([KVKind(3)], 1, prefix_cache=True)
    tokens = array("i", [5])
    first, second = blocks.new_table(), blocks.new_table()
    assert blocks.reserve(first, 0, 1, []) == 1
    blocks.commit(first, tokens, 1)
    computed = blocks.adopt(second, blocks.find(second, tokens, 1), 1)
    blocks.trim(second, computed)
    third = blocks.fork(second)
    check_blocks(blocks, [first, second, third])
    assert computed == 0 and third.blocks[0] == first.blocks[0]
    for table in (first, second, third):
        blocks.release(table)
    check_blocks(blocks, [])


def run_machine(machine: Any, examples: int, steps: int) -> int:
    """Random operations of `machine`, the same on every run; how many there were."""
    machine.operations = -examples  # making one is none
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.operations


def test_blocks_hold_what_a_plain_model_says() -> None:
    assert run_machine(Blocks, 50, 30) > 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_blocks_hold_what_a_plain_model_says_for_100_000_operations() -> None:
    assert run_machine(Blocks, 3000, 50) > 100_000
