"""What the runner is told: one step, as plain numbers in the order in which tensors want them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .sequence import Sequence

UNKNOWN_TOKEN = -1
NO_SLOT = -1


class BlockCopy(NamedTuple):
    """One block of every layer of a kind to copy. device: within the pool; out, in: from the pool
    to host memory and back, `source` and `target` being numbers in the one and in the other."""

    kind: int
    direction: Literal["device", "out", "in"]
    source: int
    target: int


@dataclass(slots=True, eq=False)
class SequenceRun:
    """The tokens at positions start to end - 1 of one sequence, which run in this step.

    num_logits: so many of the last ones are sampled after; 0 while a prompt goes on, 1 + proposals
    where proposed tokens are verified. num_draws: tokens to draw after the last of them, more than
    1 where the continuations of one prompt part; beams draw what they like. end: also its context
    length. block_tables: one of each kind, to be read before the next plan is made.
    """

    sequence: Sequence
    start: int
    end: int
    num_logits: int
    num_draws: int
    num_proposed: int
    epoch: int  # of the sequence: a preemption between plan and result makes it another
    stored: int  # positions before this one were in blocks of the prefix cache before
    adopted: Seq[tuple[int, int]]  # (kind, block of the table) that another sequence fills

    @property
    def block_tables(self) -> list[array[int]]:
        return self.sequence.table.blocks


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step. First `copies`, one after the other, then `runs` in one forward pass.

    The first `num_decodes` runs are of one token. token_ids int32 and positions int64 are of the
    tokens of all runs one after another; token id -1: the one that the step before, whose result
    was not there yet, samples for this sequence. slots int64, of each kind: where the keys and
    values of each token go, block * block_size + offset; -1: nowhere, they are in a shared block
    already, or another run of this step brings them.

    Copies of one direction and kind that follow each other can be done at once (read all, then
    write all): no two have the same target, and none has another's as its source.
    """

    copies: list[BlockCopy] = field(default_factory=list)
    runs: list[SequenceRun] = field(default_factory=list)
    num_decodes: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    positions: array[int] = field(default_factory=lambda: array("q"))
    slots: list[array[int]] = field(default_factory=list)

    def fill(self, decodes: list[SequenceRun], others: list[SequenceRun], block_size: int) -> None:
        """Set everything from the runs, and leave out copies that turned out to be of no use."""
        if len(self.copies) > 1:
            self.copies = _last_into_each(self.copies)
        self.num_decodes, self.runs = len(decodes), decodes + others
        for run in self.runs:
            sequence, start, end = run.sequence, run.start, run.end
            tokens = sequence.tokens
            known = len(tokens)
            if end - start == 1 and run.stored <= start < known:
                self.token_ids.append(tokens[start])
                self.positions.append(start)
                entry, offset = divmod(start, block_size)
                for slots, blocks in zip(self.slots, sequence.table.blocks, strict=True):
                    slots.append(blocks[entry] * block_size + offset)
            else:
                self._add_tokens(run, known)
                for slots, blocks in zip(self.slots, sequence.table.blocks, strict=True):
                    add_slots(slots, blocks, max(start, run.stored), end, block_size, start)
            for kind, entry in run.adopted:
                self._leave_out(run, kind, entry, block_size)

    def _add_tokens(self, run: SequenceRun, known: int) -> None:
        ids = run.sequence.tokens[run.start : run.end]
        if run.num_proposed:
            ids += run.sequence.proposed[: run.num_proposed]
        ids.extend([UNKNOWN_TOKEN] * (run.end - run.start - len(ids)))
        self.token_ids += ids
        self.positions.extend(range(run.start, run.end))

    def _leave_out(self, run: SequenceRun, kind: int, block: int, block_size: int) -> None:
        """The tokens of `run` in this block of its table, which another sequence fills."""
        slots = self.slots[kind]
        offset = len(slots) - run.end  # of position 0
        begin, end = max(block * block_size, run.start), min((block + 1) * block_size, run.end)
        for position in range(begin, end):
            slots[offset + position] = NO_SLOT


def _last_into_each(copies: list[BlockCopy]) -> list[BlockCopy]:
    """Those that no later one overwrites: a block is given anew when nobody needs it as it is."""
    last: dict[tuple[int, bool, int], BlockCopy] = {}
    for copy in reversed(copies):
        last.setdefault((copy.kind, copy.direction == "out", copy.target), copy)
    return list(last.values())[::-1]


def add_slots(
    slots: array[int], blocks: array[int], begin: int, end: int, size: int, start: int
) -> None:
    """The slots of positions start to end - 1; those before `begin` have none."""
    if begin > start:
        slots.extend([NO_SLOT] * (min(begin, end) - start))
    while begin < end:
        block, offset = divmod(begin, size)
        count = min(size - offset, end - begin)
        first = blocks[block] * size + offset
        if count == 1:
            slots.append(first)
        else:
            slots.extend(range(first, first + count))
        begin += count
