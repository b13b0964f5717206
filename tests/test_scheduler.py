"""What the scheduler promises, by example: who runs, what is shared, refused and counted."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from lowbit.evals.scheduler_bench import WASTE_TARGET, decoding, equal_requests, trace_waste
from lowbit.kernels.errors import UserError
from lowbit.runtime.scheduling import (
    KVKind,
    RequestState,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    request_stats,
)
from lowbit.runtime.scheduling.integrity import check_scheduler

from .fake_runner import FakeRunner, advance, expected, expected_beams
from .test_scheduler_machine import check_tokens

SMALL = SchedulerConfig((KVKind(64),), block_size=4, max_num_seqs=8, max_num_batched_tokens=32)


class Served:
    """A scheduler with its runner and a clock that counts steps."""

    def __init__(self, config: SchedulerConfig, requests: list[RequestState]) -> None:
        self.steps = 0
        self.scheduler = Scheduler(config, lambda: float(self.steps))
        self.runner = FakeRunner(config)
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> Any:
        plan = self.scheduler.plan()
        check_scheduler(self.scheduler)
        sampled = self.runner.run(plan)
        self.steps += 1
        self.scheduler.update(plan, sampled)
        advance(self.scheduler, plan)
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        for allocator in self.scheduler.blocks.allocators:
            assert allocator.available == allocator.num_blocks


def ask(name: str, length: int, max_tokens: int = 4, **settings: Any) -> RequestState:
    """A request whose prompt depends on its name's first letter alone."""
    rng = random.Random(name[0])
    return RequestState(name, [rng.randrange(3) for _ in range(length)], max_tokens, **settings)


def names(plan: Any) -> list[str]:
    return [run.sequence.request.request_id for run in plan.runs]


def test_scheduling_needs_no_torch() -> None:
    code = "import sys, lowbit.runtime.scheduling.integrity; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_step_mixes_decodes_and_a_chunk_of_a_prompt_within_its_budget() -> None:
    served = Served(SMALL, [ask("a", 5, 20), ask("b", 6, 20)])
    served.step()
    served.scheduler.add(ask("c", 60))
    plan = served.step()
    assert names(plan) == ["a", "b", "c"] and plan.num_decodes == 2
    assert [(r.start, r.end, r.num_logits) for r in plan.runs] == [(5, 6, 1), (6, 7, 1), (0, 30, 0)]
    assert [(r.start, r.end) for r in served.step().runs] == [(6, 7), (7, 8), (30, 60)]
    served.finish()


def test_one_that_finishes_leaves_at_once_and_one_that_waits_joins_at_once() -> None:
    config = replace(SMALL, max_num_seqs=1)
    served = Served(config, [ask("a", 4, 2), ask("b", 4, 2)])
    assert [names(served.step()) for _ in range(4)] == [["a"], ["a"], ["b"], ["b"]]


def test_requests_of_one_step_share_the_blocks_of_a_common_prompt() -> None:
    first, second = ask("a1", 21), ask("a2", 21)
    served = Served(replace(SMALL, max_num_batched_tokens=40), [first, second])
    plan = served.step()
    assert [(r.start, r.end) for r in plan.runs] == [(20, 21), (0, 21)]
    assert second.num_cached_tokens == 20 and first.num_cached_tokens == 0
    assert served.scheduler.stats().hit_rate == 20 / 42
    assert served.scheduler.blocks.allocators[0].in_use == 7
    served.finish()


def test_a_prompt_that_is_known_whole_runs_its_last_token_and_stores_nothing() -> None:
    served = Served(SMALL, [ask("a1", 16)])
    served.finish()
    served.scheduler.add(ask("a2", 16))
    plan = served.step()
    assert [(r.start, r.end) for r in plan.runs] == [(15, 16)] and list(plan.slots[0]) == [-1]
    served.finish()


def test_a_request_may_ask_that_all_of_its_prompt_is_computed() -> None:
    served = Served(SMALL, [ask("a1", 16)])
    served.finish()
    served.scheduler.add(ask("a2", 16, reuse_prefix=False))
    assert [(r.start, r.end) for r in served.step().runs] == [(0, 16)]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
def test_what_the_prefix_cache_saves_is_what_is_not_computed(windows: tuple[int | None]) -> None:
    """The same requests with and without it: the same tokens, and each is computed or cached."""
    rng = random.Random(1)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 40))] for _ in range(60)]
    prompts = [rng.choice(prompts)[: rng.randint(1, 40)] + p for p in prompts]
    outputs, computed, cached = [], [], []
    for prefix_cache in (True, False):
        kinds = tuple(KVKind(600, w) for w in windows)
        requests = [RequestState(str(i), p, 6) for i, p in enumerate(prompts)]
        served = Served(replace(SMALL, kinds=kinds, prefix_cache=prefix_cache), requests)
        served.finish()
        stats = served.scheduler.stats()
        assert stats.preemptions == 0 and stats.tokens.computed == served.runner.computed
        outputs.append([r.sequences[0].tokens.tolist() for r in requests])
        computed.append(stats.tokens.computed)
        cached.append(stats.tokens.cached)
        assert cached[-1] == sum(r.num_cached_tokens for r in requests)
    assert outputs[0] == outputs[1]
    assert cached[1] == 0 < cached[0] and computed[0] + cached[0] == computed[1]


def test_a_block_that_others_hold_is_copied_before_it_is_written() -> None:
    request = ask("a", 6, 4, n=3)
    served = Served(SMALL, [request])
    assert served.step().runs[0].num_draws == 3
    assert served.scheduler.blocks.allocators[0].in_use == 2
    plan = served.step()
    assert len(plan.copies) == 2 and {c.direction for c in plan.copies} == {"device"}
    assert len({c.source for c in plan.copies}) == 1, "the last one writes in place"
    served.finish()
    check_tokens(request)
    assert len({tuple(s.generated) for s in request.sequences}) > 1


def test_beams_share_their_past_and_the_outdone_ones_give_their_blocks_back() -> None:
    request = ask("a", 9, 12, n=4, lockstep=True)
    served = Served(SMALL, [request])
    served.finish()
    assert {tuple(s.generated) for s in request.sequences} == expected_beams(4, 12)


def test_blocks_that_a_window_has_passed_are_freed() -> None:
    config = replace(SMALL, kinds=(KVKind(64), KVKind(5, sliding_window=6)), prefix_cache=False)
    request = ask("a", 40, 60)
    served = Served(config, [request])
    while served.scheduler.has_work:
        served.step()
        full, window = served.scheduler.blocks.allocators
        assert window.in_use <= 5
    check_tokens(request)


def test_when_blocks_run_out_the_last_that_came_waits_and_is_computed_again() -> None:
    config = replace(SMALL, kinds=(KVKind(9),), prefix_cache=False)
    requests = [ask("a", 12, 12), ask("b", 12, 12)]
    served = Served(config, requests)
    served.finish()
    assert [r.num_preemptions for r in requests] == [0, 1]
    for request in requests:
        check_tokens(request)
    assert served.runner.computed > sum(r.max_stored for r in requests)


def test_swapped_blocks_come_back_and_nothing_is_computed_again() -> None:
    kinds = (KVKind(9, num_host_blocks=9),)
    config = replace(SMALL, kinds=kinds, prefix_cache=False, preemption="swap")
    requests = [ask("a", 12, 12), ask("b", 12, 12)]
    served = Served(config, requests)
    copies = []
    while served.scheduler.has_work:
        copies += served.step().copies
    assert [c.direction for c in copies] == ["out"] * 4 + ["in"] * 4
    assert [r.num_swaps for r in requests] == [0, 1]
    assert served.runner.computed == sum(r.max_stored for r in requests)
    for request in requests:
        check_tokens(request)


def test_a_more_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    config = replace(SMALL, max_num_seqs=2, policy="priority")
    late = ask("u", 4, 4, priority=-1)
    requests = [ask("a", 4, 20, priority=1), ask("b", 4, 20, priority=0)]
    served = Served(config, requests)
    served.step()
    served.scheduler.add(late)
    assert set(names(served.step())) == {"b", "u"}
    assert requests[0].status is RequestStatus.PREEMPTED
    served.finish()


def test_a_static_batch_starts_when_the_one_before_is_done() -> None:
    steps = {}
    for batching in ("continuous", "static"):
        requests = [ask("a", 4, 2), ask("b", 4, 9), ask("c", 4, 2), ask("d", 4, 9)]
        served = Served(replace(SMALL, max_num_seqs=2, batching=batching), requests)
        together = set()
        while served.scheduler.has_work:
            together.add(tuple(sorted(names(served.step()))))
        steps[batching] = served.steps
        assert (("b", "c") in together) == (batching == "continuous")
    assert steps["continuous"] < steps["static"]


def test_proposed_tokens_are_verified_in_one_step_and_rejected_ones_taken_back() -> None:
    request = ask("a", 6, 12)
    served = Served(SMALL, [request])
    served.step()
    right = expected(request.prompt, 12)
    sequence = request.sequences[0]
    served.scheduler.propose(sequence, [*right[1:3], (right[3] + 1) % 3, right[4]])
    plan = served.step()
    assert (plan.runs[0].start, plan.runs[0].end, plan.runs[0].num_logits) == (6, 11, 5)
    assert sequence.generated.tolist() == right[:4] and sequence.num_computed == 9
    tokens = served.scheduler.stats().tokens
    assert (tokens.proposed, tokens.accepted) == (4, 2)
    served.finish()
    check_tokens(request)


def test_proposals_take_no_block_from_others() -> None:
    config = replace(SMALL, kinds=(KVKind(4),), prefix_cache=False)
    requests = [ask("a", 4, 5), ask("b", 4, 5)]
    served = Served(config, requests)
    served.step()
    for request in requests:
        right = expected(request.prompt, 5)
        served.scheduler.propose(request.sequences[0], right[1:4])
    served.finish()
    assert all(r.num_preemptions == 0 for r in requests)


def test_a_plan_may_be_made_before_the_results_of_the_one_before() -> None:
    request = ask("a", 6, 5)
    served = Served(SMALL, [request])
    scheduler, runner = served.scheduler, served.runner
    plan = scheduler.plan()
    results = runner.run(plan)
    unknown = 0
    while scheduler.has_work:
        ahead = scheduler.plan()
        unknown += list(ahead.token_ids).count(-1)
        told = runner.run(ahead)
        scheduler.update(plan, results)
        plan, results = ahead, told
        check_scheduler(scheduler)
    assert unknown == 4
    check_tokens(request)


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_a_cancelled_request_gives_its_blocks_back_at_the_next_step(state: str) -> None:
    config = replace(SMALL, kinds=(KVKind(9, num_host_blocks=9),), preemption="swap",
                     prefix_cache=False, max_num_seqs=2)  # fmt: skip
    requests = [ask("a", 12, 12), ask("b", 12, 12), ask("c", 12, 12)]
    served = Served(config, requests)
    gone = requests[2 if state == "waiting" else 1]
    while gone.status is not RequestStatus(state) or not served.steps:
        served.step()
    served.scheduler.cancel(gone.request_id)
    assert gone.status is RequestStatus.CANCELLED
    plan = served.step()
    assert gone.request_id not in names(plan)
    assert not any(s.host_blocks or s.table.blocks[0] for s in gone.sequences)
    served.finish()
    for request in requests:
        check_tokens(request)


def test_what_a_failed_request_put_into_the_prefix_cache_is_not_used() -> None:
    served = Served(SMALL, [ask("a1", 16)])
    served.step()
    served.scheduler.fail("a1")
    served.scheduler.add(again := ask("a2", 16))
    served.step()
    assert again.num_cached_tokens == 0
    served.finish()


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(replace(SMALL, kinds=(KVKind(9), KVKind(2, sliding_window=6))))
    with pytest.raises(UserError, match=r"a can never fit.* 30 .* 8 new tokens need 10 KV blocks"):
        scheduler.add(ask("a", 30, 8))
    with pytest.raises(
        UserError, match="3 KV blocks of 4 tokens in layers with a window of 6, and there are 2"
    ):
        scheduler.add(ask("b", 20, 4))
    with pytest.raises(UserError, match="9 continuations, and max_num_seqs is 8"):
        scheduler.add(ask("c", 4, 4, n=9))
    assert not scheduler.has_work
    Scheduler(replace(SMALL, kinds=(KVKind(9),))).add(ask("d", 33, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_num_batched_tokens": 7}, "must be at least max_num_seqs"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"policy": "lifo"}, "policy must be one of fcfs, priority, got 'lifo'"),
        ({"kinds": ()}, "at least one kind"),
        ({"kinds": (KVKind(4), KVKind(5))}, "must differ in their windows"),
        ({"preemption": "swap"}, "needs num_host_blocks"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SMALL, **wrong)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        RequestState("a", [], 4)


def test_metrics_are_those_of_the_steps() -> None:
    config = replace(SMALL, max_num_seqs=1)
    requests = [ask("a", 4, 3), ask("b", 4, 3)]
    served = Served(config, requests)
    served.finish()
    first, second = (request_stats(r) for r in requests)
    assert (first.queue_seconds, first.ttft, first.tpot, first.itl) == (0, 1, 1, (1, 1))
    assert (second.queue_seconds, second.ttft, second.seconds) == (3, 4, 6)
    assert (second.prompt_tokens, second.output_tokens, second.preemptions) == (4, 3, 0)
    assert served.scheduler.stats().tokens_per_second == 6 / served.steps


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_two_thousand_requests_end_with_an_empty_pool_and_the_right_tokens(
    prefix_cache: bool, preemption: Any
) -> None:
    """500 in each of four settings: random lengths, arrivals, cancels, a pool for a few of them."""
    rng = random.Random(7)
    kinds = (KVKind(24, num_host_blocks=30), KVKind(20, 9, num_host_blocks=30))
    config = SchedulerConfig(kinds, 4, 6, 24, preemption=preemption, prefix_cache=prefix_cache)
    served, requests = Served(config, []), []
    while len(requests) < 500 or served.scheduler.has_work:
        for _ in range(min(rng.randrange(3), 500 - len(requests))):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
            lockstep = rng.random() < 0.1
            requests.append(
                RequestState(str(len(requests)), prompt, rng.randint(1, 16),
                             n=rng.choice([1, 1, 1, 2]), lockstep=lockstep)
            )  # fmt: skip
            try:
                served.scheduler.add(requests[-1])
            except UserError:
                requests[-1].status = RequestStatus.CANCELLED
        if rng.random() < 0.05 and served.scheduler.roster.requests:
            served.scheduler.cancel(rng.choice(list(served.scheduler.roster.requests)))
        served.step()
    stats = served.scheduler.stats()
    assert stats.preemptions > 50 and (stats.swaps > 0) == (preemption == "swap")
    assert stats.kv.blocks_in_use == 0 and (stats.tokens.cached > 0) == prefix_cache
    assert sum(r.status is RequestStatus.FINISHED for r in requests) > 400
    for request in requests:
        check_tokens(request)


def test_a_step_makes_as_many_calls_whether_nobody_or_many_wait() -> None:
    counted = []
    for waiting in (0, 2000):
        scheduler = decoding(running=8, waiting=waiting, repeats=1)
        calls: list[str] = []
        sys.setprofile(lambda frame, event, arg, calls=calls: calls.append(event))
        plan = scheduler.plan()
        sys.setprofile(None)
        assert plan.num_decodes == 8 and len(scheduler.roster.waiting) == waiting
        counted.append(len(calls))
    assert abs(counted[1] - counted[0]) < 100


def test_sixteen_requests_of_128_and_128_tokens_waste_under_4_percent_of_the_slots() -> None:
    config = SchedulerConfig((KVKind(1000),), 16, 16)
    assert trace_waste(equal_requests(), config)["waste"] < WASTE_TARGET


def test_beams_whose_prompt_is_known_whole_run_at_once() -> None:
    served = Served(SMALL, [ask("a1", 16)])
    served.finish()
    served.scheduler.add(ask("a2", 16, lockstep=True))
    assert [(r.start, r.end, r.num_logits) for r in served.step().runs] == [(15, 16, 1)]
