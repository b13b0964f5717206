"""The scheduler against a plain model, under random arrivals, cancels, proposals and tiny pools.

    pytest -m slow tests/test_scheduler_machine.py     # 100,000 random operations

The model is what each request must produce, which depends on its prompt alone, and keys that are
hashes of prefixes (tests/fake_runner.py). After every call every block is accounted for.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from lowbit.kernels.errors import UserError
from lowbit.runtime.scheduling import (
    KVKind,
    RequestState,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)
from lowbit.runtime.scheduling.integrity import check_scheduler

from .fake_runner import FakeRunner, advance, expected, expected_beams
from .test_block_manager import run_machine

WINDOWS = [(None,), (3,), (None, 5), (None, 2, 9)]
STEM = [1, 0, 0, 1, 0, 1, 1, 1, 0, 0]  # how many prompts begin
REQUEST = st.fixed_dictionaries(
    {
        "stem": st.integers(0, len(STEM)),
        "rest": st.lists(st.integers(0, 1), min_size=1, max_size=6),
        "max_tokens": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 2, 3]),
        "lockstep": st.booleans(),
        "priority": st.integers(0, 2),
        "reuse_prefix": st.sampled_from([True, True, False]),
    }
)
ENOUGH = 2000  # steps in which whatever is left is done, unless somebody starves


class Requests(RuleBasedStateMachine):
    """`pending` are the plans whose results have not been told yet, with the results: at most 2.
    Counted are the calls of the scheduler."""

    operations = 0

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        draw = data.draw
        swap = draw(st.booleans())
        host = st.integers(1, 12)
        kinds = tuple(
            KVKind(draw(st.integers(8, 14)), window, draw(host) if swap else 0)
            for window in draw(st.sampled_from(WINDOWS))
        )
        seqs = draw(st.integers(2, 6))
        self.config = SchedulerConfig(
            kinds,
            block_size=draw(st.integers(2, 4)),
            max_num_seqs=seqs,
            max_num_batched_tokens=draw(st.integers(seqs, 16)),
            policy=draw(st.sampled_from(["fcfs", "priority"])),
            batching=draw(st.sampled_from(["continuous", "continuous", "static"])),
            preemption="swap" if swap else "recompute",
            prefix_cache=draw(st.booleans()),
        )
        self.scheduler, self.runner = Scheduler(self.config), FakeRunner(self.config)
        self.requests: list[RequestState] = []
        self.pending: list[tuple[StepPlan, list[list[int]]]] = []
        for request in draw(st.lists(REQUEST, min_size=3, max_size=8)):
            self.add(request)

    @rule(request=REQUEST)
    def add(self, request: dict[str, Any]) -> None:
        name = str(len(self.requests))
        stem, rest = request["stem"], request["rest"]
        settings = {k: v for k, v in request.items() if k not in ("stem", "rest")}
        asked = RequestState(name, [*STEM[:stem], *rest], **settings)
        try:
            self.scheduler.add(asked)
        except UserError:
            assert name not in self.scheduler.roster.requests
            return
        self.requests.append(asked)
        type(self).operations += 1
        check_scheduler(self.scheduler)

    @precondition(lambda self: len(self.scheduler.roster.requests) > 2)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.roster.requests)))
        (self.scheduler.fail if fails else self.scheduler.cancel)(name)
        type(self).operations += 1
        check_scheduler(self.scheduler)

    @rule(data=st.data(), steps=st.integers(1, 6), speculate=st.booleans())
    def step(self, data: st.DataObject, steps: int, speculate: bool) -> None:
        """Whole steps, as an engine takes them that does not plan ahead."""
        while self.pending:
            self.update()
        for _ in range(steps):
            if speculate:
                self.propose(*data.draw(st.tuples(st.integers(1, 4), st.integers(0, 4))))
            self.plan()
            self.update()

    def propose(self, count: int, wrong: int) -> None:
        """For every sequence that can take proposals; those from number `wrong` on are rejected."""
        for request in self.scheduler.roster.running:
            for sequence in request.live:
                if not request.lockstep and not sequence.unsettled:
                    right = expected(sequence.tokens, count)
                    tokens = [t if i < wrong else (t + 1) % 3 for i, t in enumerate(right)]
                    self.scheduler.propose(sequence, tokens)
                    type(self).operations += 1

    @precondition(lambda self: len(self.pending) < 2)
    @rule()
    def plan(self) -> None:
        """At most one plan is made before the results of the one before are told."""
        plan = self.scheduler.plan()
        type(self).operations += 1
        check_scheduler(self.scheduler)
        if not self.pending:
            self._check_that_the_first_gets_on(plan)
        self.pending.append((plan, self.runner.run(plan)))

    @precondition(lambda self: self.pending)
    @rule()
    def update(self) -> None:
        plan, tokens = self.pending.pop(0)
        self.scheduler.update(plan, tokens)
        type(self).operations += 1
        advance(self.scheduler, plan)
        check_scheduler(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        while self.pending:
            self.update()
        for _ in range(ENOUGH):
            if not self.scheduler.has_work:
                break
            self.plan()
            self.update()
        assert not self.scheduler.has_work, "a request starved"
        for allocator in self.scheduler.blocks.allocators:
            assert allocator.available == allocator.num_blocks, "blocks were not given back"
        for request in self.requests:
            check_tokens(request)

    def _check_that_the_first_gets_on(self, plan: StepPlan) -> None:
        roster = self.scheduler.roster
        if not roster.requests:
            assert not plan.runs
            return
        assert plan.runs, "there are requests, and none gets on"
        if self.config.policy == "fcfs":
            first = min(roster.requests.values(), key=lambda r: r.order)
            assert any(run.sequence.request is first for run in plan.runs)


def check_tokens(request: RequestState) -> None:
    """Its tokens are the right ones: all of them, or up to where it was ended."""
    if request.lockstep:
        if (
            request.status is RequestStatus.FINISHED
            and request.sequences[0].finish_reason != "error"
        ):
            beams = {tuple(s.generated) for s in request.sequences}
            assert beams == expected_beams(request.n, request.max_tokens)
        return
    for draw, sequence in enumerate(request.sequences):
        right = expected(request.prompt, request.max_tokens, draw)
        assert sequence.generated.tolist() == right[: sequence.num_generated]
        assert len(sequence.token_times) == sequence.num_generated
        if request.status is RequestStatus.FINISHED and sequence.finish_reason == "length":
            assert sequence.num_generated == request.max_tokens
    assert request.status in (RequestStatus.FINISHED, RequestStatus.CANCELLED)


def test_requests_get_their_tokens_and_give_their_blocks_back() -> None:
    assert run_machine(Requests, 60, 40) > 4000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_requests_get_their_tokens_and_give_their_blocks_back_in_100_000_operations() -> None:
    assert run_machine(Requests, 900, 40) > 100_000
