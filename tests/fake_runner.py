"""A runner whose keys and values can be checked: each is the hash of the tokens up to its own.

It does with a plan what a real runner does: copies blocks, stores what is new into slots, and then
looks at every key that attention would read, through the block tables. The next token is a function
of the tokens before it, so what a request must produce is known without any cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from lowbit.runtime.scheduling import Scheduler, SchedulerConfig, SequenceRun, StepPlan
from lowbit.runtime.scheduling.sequence import Sequence as Continuation

VOCABULARY = 3  # few, so that requests often have tokens in common
_SEED, _PRIME, _MASK = 17, 1000003, (1 << 61) - 1


def extend_hash(before: int, token: int) -> int:
    return (before * _PRIME + token + 1) & _MASK


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """Of each token with those before it."""
    hashes, value = [], _SEED
    for token in tokens:
        value = extend_hash(value, token)
        hashes.append(value)
    return hashes


def next_token(prefix: int, draw: int = 0) -> int:
    """What the model says after a prefix; draw: for continuations that part there."""
    return (prefix * 7919 + draw * 104729 >> 7) % VOCABULARY


def expected(prompt: Sequence[int], count: int, draw: int = 0) -> list[int]:
    """What a request must produce; draw: which of its continuations."""
    value, out = prefix_hashes(prompt)[-1], []
    for _ in range(count):
        out.append(next_token(value, 0 if out else draw))
        value = extend_hash(value, out[-1])
    return out


class FakeRunner:
    """computed: tokens that ran."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pools: list[dict[int, int]] = [{} for _ in config.kinds]  # slot -> hash
        self.host: list[dict[int, int]] = [{} for _ in config.kinds]
        self.newest: dict[int, int] = {}  # what was last sampled for a sequence, by its id
        self.computed = 0

    def run(self, plan: StepPlan) -> list[list[int]]:
        """What `Scheduler.update` takes; for beams nothing."""
        self._copy(plan)
        runs = list(self._tokens(plan))
        self._store(plan, runs)
        size = self.config.max_num_batched_tokens
        assert len(plan.token_ids) == len(plan.positions) <= size, "over max_num_batched_tokens"
        sampled = []
        for run, tokens in zip(plan.runs, runs, strict=True):
            hashes = self._attend(run, tokens)
            sampled.append(self._sample(run, tokens, hashes))
        self.computed += len(plan.token_ids)
        return sampled

    def _copy(self, plan: StepPlan) -> None:
        size = self.config.block_size
        for _, same in groupby(plan.copies, key=lambda copy: (copy.kind, copy.direction)):
            copies, read = list(same), []
            assert len({c.target for c in copies}) == len(copies), "a block is copied to twice"
            for kind, direction, source, _ in copies:
                pool = (self.host if direction == "in" else self.pools)[kind]
                read.append([pool.get(source * size + i) for i in range(size)])
            for (kind, direction, _, target), values in zip(copies, read, strict=True):
                pool = (self.host if direction == "out" else self.pools)[kind]
                for i, value in enumerate(values):
                    pool[target * size + i] = -1 if value is None else value

    def _tokens(self, plan: StepPlan) -> Iterator[list[int]]:
        """All tokens of each run's sequence up to its end, from what the plan says."""
        at = 0
        for number, run in enumerate(plan.runs):
            count = run.end - run.start
            assert count >= 1 and (number < plan.num_decodes) == (count == 1)
            assert list(plan.positions[at : at + count]) == list(range(run.start, run.end))
            ids = list(plan.token_ids[at : at + count])
            if ids[0] == -1:
                assert count == 1
                ids = [self.newest[id(run.sequence)]]
            before = list(run.sequence.tokens[: run.start])
            if len(before) < run.start:
                before.append(self.newest[id(run.sequence)])
            yield before + ids
            at += count
        assert at == len(plan.token_ids)

    def _store(self, plan: StepPlan, runs: list[list[int]]) -> None:
        hashes = [h for run, tokens in zip(plan.runs, runs, strict=True)
                  for h in prefix_hashes(tokens)[run.start :]]  # fmt: skip
        for pool, slots in zip(self.pools, plan.slots, strict=True):
            written = [slot for slot in slots if slot >= 0]
            assert len(set(written)) == len(written), "a slot is written twice"
            assert all(slot >= self.config.block_size for slot in written), "block 0 is written"
            for slot, value in zip(slots, hashes, strict=True):
                if slot >= 0:
                    pool[slot] = value

    def _attend(self, run: SequenceRun, tokens: list[int]) -> list[int]:
        """Every key that the tokens of `run` can see is the right one."""
        hashes, size = prefix_hashes(tokens), self.config.block_size
        for kind, settings in enumerate(self.config.kinds):
            window, table = settings.sliding_window, run.block_tables[kind]
            for j in range(max(0, run.start - window + 1) if window else 0, run.end):
                block = table[j // size]
                assert block, f"position {j} of kind {kind} has no block"
                held = self.pools[kind].get(block * size + j % size)
                assert held == hashes[j], f"position {j} of kind {kind} holds another prefix"
        return hashes

    def _sample(self, run: SequenceRun, tokens: list[int], hashes: list[int]) -> list[int]:
        if not run.num_logits or run.sequence.request.lockstep:
            return []
        if run.num_draws > 1:
            return [next_token(hashes[-1], draw) for draw in range(run.num_draws)]
        new = []
        for i in range(run.end - run.num_logits, run.end):
            new.append(next_token(hashes[i]))
            if i + 1 < run.end and tokens[i + 1] != new[-1]:
                break  # the proposal that follows is rejected
        self.newest[id(run.sequence)] = new[-1]
        return new


def advance(scheduler: Scheduler, plan: StepPlan) -> None:
    """Let the beams of a plan that has been updated go on as `beam_choices` says."""
    for request in {id(r): r for r in (run.sequence.request for run in plan.runs)}.values():
        beams = request.sequences
        if request.lockstep and not request.is_over and beams and all(
            b.unsettled and not b.num_pending for b in beams
        ):  # fmt: skip
            scheduler.advance_beams(request, beam_choices(beams, request.n))


def beam_choices(beams: list[Continuation], n: int) -> list[tuple[Continuation, int]]:
    """The n best of all ways on, by a score that depends on the tokens alone; no two the same."""
    ways = [(beam, token) for beam in beams for token in range(VOCABULARY)]
    return sorted(ways, key=lambda way: _score([*way[0].generated, way[1]]))[:n]


def expected_beams(n: int, count: int) -> set[tuple[int, ...]]:
    """The beams after `count` tokens."""
    beams: list[list[int]] = [[]]
    for _ in range(count):
        ways = [[*beam, token] for beam in beams for token in range(VOCABULARY)]
        beams = sorted(ways, key=_score)[:n]
    return {tuple(beam) for beam in beams}


def _score(tokens: list[int]) -> int:
    return prefix_hashes(tokens)[-1] * 2654435761 % (1 << 31)
