"""The scheduler's face: requests in, steps out, results in.

Continuous batching at the granularity of tokens (Yu et al. 2022, Orca), with prompts cut into
chunks that share steps with decodes (Agrawal et al. 2024, Sarathi-Serve, arXiv:2403.02310), over
paged keys and values (Kwon et al. 2023, arXiv:2309.06180). planner.py says who gets what of a step.

One plan may be made before the results of the one before are there: a token that is not known yet
is planned as -1. Only where what comes next depends on the result (proposals, beams, the point
where continuations part) a sequence waits for it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from .config import SchedulerConfig
from .plan import SequenceRun, StepPlan
from .planner import StepPlanner
from .roster import Roster
from .sequence import OVER, FinishReason, RequestState, RequestStatus, Sequence
from .stats import Counts, SchedulerStats


class Scheduler:
    """`add` requests; then `plan` a step, run it, `update` with what was sampled, and again.

    clock: seconds. roster: who runs and who waits. counts: see SchedulerStats.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.config, self.clock = config, clock
        self.roster = Roster(config)
        self.blocks = self.roster.blocks
        self.counts = Counts()
        self._started: float | None = None

    def add(self, request: RequestState) -> None:
        """Let `request` wait for its turn. UserError where it could never run to its end."""
        self.roster.add(request, self.clock())

    def cancel(self, request_id: str) -> None:
        """End a request at once; its blocks are free in the next plan. Nothing if it is over."""
        if request := self.roster.requests.get(request_id):
            self.roster.end(request, RequestStatus.CANCELLED, self.clock())

    def fail(self, request_id: str) -> None:
        """End a request whose results are broken; the prefix cache forgets what it put there."""
        if request := self.roster.requests.get(request_id):
            for sequence in request.live:
                sequence.finish_reason = "error"
                self.blocks.disown(sequence.table)
            self.roster.end(request, RequestStatus.FINISHED, self.clock())

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """No more tokens for this continuation; its request ends with its last one."""
        request = sequence.request
        assert sequence.finish_reason is None and request.status not in OVER
        sequence.finish_reason = reason
        if all(s.finish_reason is not None for s in request.sequences):
            self.roster.end(request, RequestStatus.FINISHED, self.clock())
        else:
            self.roster.release(sequence)

    def propose(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Tokens that may come after the known ones, to be verified in the next step.

        As many as there is room for; they cost no other sequence its token or its blocks. The
        tokens reported for the step are those that were accepted and one more. Not for beams.
        """
        assert not sequence.request.lockstep and not sequence.unsettled
        sequence.proposed = array("i", tokens)

    @property
    def has_work(self) -> bool:
        """Requests wait or run, or blocks of those that are over wait for the next plan."""
        return not self.roster.is_empty

    def plan(self) -> StepPlan:
        """The next step; without runs where there is nothing to do before results come."""
        now = self.clock()
        if self._started is None:
            self._started = now
        self.roster.free_leaving()
        planner = StepPlanner(self.roster)
        plan = planner.make()
        for request in planner.started:
            request.scheduled = now
            self.counts.prompt += request.num_prompt_tokens
        self.counts.cached += planner.num_reused
        self.counts.steps += 1
        self.counts.computed += len(plan.token_ids)
        return plan

    def update(self, plan: StepPlan, tokens: Seq[Seq[int]]) -> None:
        """What was sampled in `plan`, for each of its runs; plans are updated in their order.

        For a run without logits and for beams: none. With proposals: those that were accepted and
        the token after them; a continuation that ends among them is cut there. Where continuations
        part: the first token of each. Otherwise: one. What is over by now is passed over.
        """
        now = self.clock()
        for run, new in zip(plan.runs, tokens, strict=True):
            if not run.num_logits:
                continue
            sequence = run.sequence
            request = sequence.request
            sequence.num_pending -= 1
            if sequence.finish_reason is not None or request.status in OVER:
                continue
            if request.first_token is None:
                request.first_token = now
            if request.lockstep:
                assert not len(new), "beams go on by advance_beams"
                continue  # unsettled until then
            sequence.unsettled = False
            if run.num_draws > 1:
                self._part(sequence, new, now)
            else:
                if run.num_proposed:
                    self._verify(run, new)
                self._append(sequence, new, now)

    def advance_beams(self, request: RequestState, choices: Seq[tuple[Sequence, int]]) -> None:
        """How the beams of `request` go on after their step: (beam, its next token), at most n.

        A beam may go on several ways, or none, which drops it. Without choices the request ends.
        """
        if request.status in OVER:
            return
        assert len(choices) <= request.n
        now, beams, kept = self.clock(), [], set()
        for parent, _ in choices:
            assert parent.unsettled and not parent.num_pending and parent in request.sequences
            beams.append(self._split(parent) if parent in kept else parent)
            kept.add(parent)
        for beam in request.sequences:
            if beam not in kept:
                beam.finish_reason = "dropped"
        if not beams:
            self.roster.end(request, RequestStatus.FINISHED, now)
            return
        self._drop_outdone(request, beams)
        for beam, (_, token) in zip(beams, choices, strict=True):
            beam.unsettled = False
            self._append(beam, (token,), now)

    def stats(self) -> SchedulerStats:
        """Of this moment, and of all steps so far."""
        roster = self.roster
        kv = self.blocks.usage((s.table, s.num_computed) for s in roster.holders())
        seconds = 0.0 if self._started is None else self.clock() - self._started
        return SchedulerStats(
            len(roster.running),
            len(roster.waiting),
            self.counts.copy(),
            roster.num_preemptions,
            roster.num_swaps,
            kv,
            seconds,
        )

    def _append(self, sequence: Sequence, new: Seq[int], now: float) -> None:
        assert len(new), "a run with logits gives a token at least"
        for token in new:
            sequence.tokens.append(token)
            sequence.token_times.append(now)
        self.counts.output += len(new)
        if sequence.proposed:
            sequence.proposed = array("i")
        if sequence.num_generated >= sequence.request.max_tokens:
            self.finish(sequence, "length")

    def _verify(self, run: SequenceRun, new: Seq[int]) -> None:
        """Take back what was planned for proposals that were rejected, or lie after the end."""
        sequence, accepted = run.sequence, len(new) - 1
        assert 0 <= accepted <= run.num_proposed
        assert list(new[:accepted]) == sequence.proposed[:accepted].tolist()
        self.counts.proposed += run.num_proposed
        self.counts.accepted += accepted
        if sequence.epoch == run.epoch:
            sequence.num_computed -= run.num_proposed - accepted

    def _part(self, sequence: Sequence, new: Seq[int], now: float) -> None:
        request = sequence.request
        assert len(new) == request.n
        continuations = [sequence, *(self._split(sequence) for _ in new[1:])]
        request.sequences = continuations
        for each, token in zip(continuations, new, strict=True):
            self._append(each, (token,), now)

    def _split(self, sequence: Sequence) -> Sequence:
        other = sequence.split(self.blocks.fork(sequence.table))
        if sequence.host_blocks is not None:  # preempted meanwhile: they are shared there, too
            other.host_blocks = [blocks[:] for blocks in sequence.host_blocks]
        return other

    def _drop_outdone(self, request: RequestState, beams: list[Sequence]) -> None:
        """`beams` are what `request` goes on with."""
        for beam in request.sequences:
            if beam.finish_reason == "dropped":
                self.roster.release(beam)
        self.roster.host.keep(request, beams)
        request.sequences = beams
