"""A step that runs while the next one is planned, its tokens still on the device.

Planning a step and preparing its numbers takes the host about as long as a GPU takes for a decode
step of a small model. So a step that only decodes is left in flight: the next one is planned with
tokens that nobody knows, takes them where they are on the device, and is launched behind it; then
the tokens of the first are read. A request that ends by what is read has run one token too many,
which is dropped.

The next step must not depend on what is read. So nothing is left in flight beside a request whose
penalties or grammar read its last token, beams, or a prompt; and while one could join, it is
awaited, so that whatever finds a prefix in the cache finds what has been seen to be finite; but for
one that takes the seat of a request which the same plan preempts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from .request import Request
from .scheduling.plan import StepPlan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence
from .step_results import Asked, Drawing, Live
from .step_runner import Ran, Unread


class Flight(NamedTuple):
    """A step that was launched at `started` (time.perf_counter). lives: of each run of the plan."""

    plan: StepPlan
    lives: list[Live]
    asked: list[Asked]
    ran: Ran
    drawing: Drawing
    started: float

    @property
    def unread(self) -> Unread:
        """The tokens that it has drawn, as the next step takes them."""
        tokens = self.drawing.drawn.tokens
        assert tokens is not None
        return Unread(tokens, self.drawing.rows)


def can_wait(plan: StepPlan, lives: Seq[Live]) -> bool:
    """Whether the next step can be planned before this one's tokens are known: each run decodes,
    and what is drawn after the next token does not depend on which it is."""
    return all(
        run.num_logits == run.num_draws == run.end - run.start == 1
        and run.start >= run.sequence.num_prompt_tokens
        and not run.num_proposed
        and _draws_alike(live)
        for run, live in zip(plan.runs, lives, strict=True)
    )


def may_plan_ahead(plan: StepPlan, scheduler: Scheduler) -> bool:
    """Whether the step after `plan`, which is in flight, will be of its sequences alone."""
    roster, config = scheduler.roster, scheduler.config
    first = roster.waiting.peek()
    if first is not None and (
        config.policy == "priority" or roster.seats + first.n <= config.max_num_seqs
    ):
        return False
    return roster.seats == sum(not is_over(run.sequence) for run in plan.runs)


def is_over(sequence: Sequence) -> bool:
    """Whether nothing more is wanted of a sequence."""
    return sequence.finish_reason is not None or sequence.request.is_over


def _draws_alike(live: Live) -> bool:
    request = live.request
    if not isinstance(request, Request):
        return False
    params = request.params
    return not params.has_penalties and params.structured_outputs is None
