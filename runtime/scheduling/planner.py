"""One step: which tokens of which sequences run in it, and who has to give up blocks for them.

Every running sequence gets its next token. What is left of the budget goes to proposed tokens and
chunks of prompts, in the order of the requests, then to requests that wait. When blocks run out,
the last of those that run gives up its own; as they are looked through from the front, a request
never takes blocks from one before it, nor from one that is in the step already. So the first
request always gets on, and none starves.
"""

from __future__ import annotations

from array import array

from .plan import SequenceRun, StepPlan
from .roster import Roster
from .sequence import RequestState, Sequence


class StepPlanner:
    """Makes one plan. num_reused: prompt tokens that it found in the prefix cache; started: the
    requests that run in it for the first time."""

    def __init__(self, roster: Roster) -> None:
        self.roster, self.config, self.blocks = roster, roster.config, roster.blocks
        self.plan = StepPlan(slots=[array("q") for _ in self.config.kinds])
        self.started: list[RequestState] = []
        self.num_reused = 0
        self._decodes: list[SequenceRun] = []
        self._others: list[SequenceRun] = []
        self._block_size = self.config.block_size
        self._budget = self.config.max_num_batched_tokens  # tokens that are left of the step
        self._owed = 0  # sequences that have yet to get a token of it
        self._joining = False  # those that run have theirs
        self._reuser: RequestState | None = None  # the last that took blocks from the prefix cache

    def make(self) -> StepPlan:
        running = self.roster.running
        batch_is_open = self.config.batching == "continuous" or not running
        if self.config.policy == "priority" and batch_is_open:
            self._yield_to_urgent()
        self._owed = sum([len(r.sequences) for r in running])
        place = 0
        while place < len(running):
            place += self._schedule(running[place])
        if batch_is_open:
            self._admit()
        self.plan.fill(self._decodes, self._others, self._block_size)
        return self.plan

    def _schedule(self, request: RequestState) -> bool:
        """Plan the next tokens of a running request; False when it had to give up its blocks."""
        sequences = request.sequences
        self._owed -= len(sequences)
        if request.lockstep and self._are_level(request):
            return self._schedule_beams(request)
        left, begun = len(sequences), False
        for sequence in sequences:
            left -= 1
            wanted = 0 if sequence.unsettled else self._wanted(sequence)
            room = self._budget - self._owed - left
            if wanted <= 0 or room <= 0:
                continue
            proposed = 0
            if wanted == 1 and sequence.proposed:
                proposed = self._room_for_proposals(sequence, room)
            wanted = min(wanted, room)
            granted = self._reserve(sequence, wanted + proposed)
            if granted:
                self._run(sequence, granted, max(0, granted - wanted))
                begun = True
            elif begun:
                break  # what is left of it goes on when there are blocks
            else:
                self._preempt(request)
                return False
        return True

    def _are_level(self, request: RequestState) -> bool:
        """Whether all beams have one token to run, as far as the prefix cache has the others."""
        for beam in request.sequences:
            if beam.num_to_run > 1:
                self._reuse(beam)
        return all(beam.num_to_run == 1 for beam in request.sequences)

    def _schedule_beams(self, request: RequestState) -> bool:
        """All beams take their next token in one step, or none does."""
        beams = request.sequences
        if self._budget < len(beams) or any(beam.unsettled for beam in beams):
            return True
        for beam in beams:
            if not self._reserve(beam, 1):
                self._preempt(request)
                return False
        for beam in beams:
            self._run(beam, 1, 0)
        return True

    def _wanted(self, sequence: Sequence) -> int:
        """Tokens that it would run if the step had room; 0: none, until results come."""
        if sequence.finish_reason is not None:
            return 0
        wanted = sequence.num_to_run
        if wanted > 1:
            wanted -= self._reuse(sequence)
        if sequence.request.lockstep and not sequence.request.parts_next:
            return wanted - 1  # beams take their last token together
        return wanted

    def _reuse(self, sequence: Sequence) -> int:
        """Take over what the prefix cache has of the tokens to run; how many that are."""
        request, start = sequence.request, sequence.num_computed
        if not request.reuse_prefix or start != sequence.table.num_cached * self._block_size:
            return 0
        known = len(sequence.tokens)
        path = self.blocks.find(sequence.table, sequence.tokens, known)
        if not path:
            return 0
        sequence.num_computed = self.blocks.adopt(sequence.table, path, known)
        self._reuser = request
        found = sequence.num_computed - start
        if request.first_token is None and not request.num_preemptions:
            request.num_cached_tokens += found
            self.num_reused += found
        return found

    def _room_for_proposals(self, sequence: Sequence, room: int) -> int:
        """Of a sequence that has one token to run."""
        if sequence.num_pending or sequence.request.parts_next:
            return 0
        longest = sequence.request.max_tokens - sequence.num_generated - 1
        return max(0, min(len(sequence.proposed), room - 1, longest))

    def _reserve(self, sequence: Sequence, wanted: int) -> int:
        """Blocks for up to `wanted` tokens, at least one, if need be from the last of those that
        run; 0 where that is this request itself, or all have their part of the step."""
        start, copies = sequence.num_computed, self.plan.copies
        if self.blocks.sliding:
            self.blocks.slide(sequence.table, start)
        while not (granted := self.blocks.reserve(sequence.table, start, start + wanted, copies)):
            victim = self.roster.running[-1]
            if victim is sequence.request or self._joining:
                return 0
            self._owed -= len(victim.sequences)
            self._preempt(victim)
        return granted

    def _run(self, sequence: Sequence, count: int, proposed: int) -> None:
        """The next `count` tokens of `sequence`, the last `proposed` ones to be verified, run."""
        start, known = sequence.num_computed, len(sequence.tokens)
        end = start + count
        stored = sequence.table.num_cached * self._block_size
        adopted = self.blocks.commit(sequence.table, sequence.tokens, min(end, known))
        num_logits, num_draws = 0, 1
        if end - proposed == known + sequence.num_pending:
            request = sequence.request
            num_logits = 1 + proposed
            if request.n > 1 and request.parts_next:
                num_draws = request.n
            sequence.num_pending += 1
            sequence.unsettled = proposed > 0 or num_draws > 1 or request.lockstep
        sequence.num_computed = end
        self._budget -= count
        run = SequenceRun(
            sequence, start, end, num_logits, num_draws, proposed, sequence.epoch, stored, adopted
        )
        (self._decodes if count == 1 else self._others).append(run)

    def _admit(self) -> None:
        """Requests that wait join the step, in their order, while there is room for the first."""
        roster = self.roster
        roster.admission.open_step(roster.running)
        self._joining = True
        static = self.config.batching == "static"
        while (self._budget > 0 or static) and (request := roster.waiting.peek()):
            if not self._has_seats(request) or not roster.admission.fits(
                request, alone=not roster.running
            ):
                return
            if request.scheduled is None:
                self.started.append(request)
            if roster.start(request, self.plan.copies):
                self._reuser = request
            self._owed += len(request.sequences)
            if not self._schedule(request):
                return

    def _yield_to_urgent(self) -> None:
        """Make room for the first that waits, from running requests of lower priority."""
        roster, request = self.roster, self.roster.waiting.peek()
        if request is None:
            return
        roster.admission.open_step(roster.running)
        while roster.running and roster.running[-1].order[0] > request.order[0]:
            if self._has_seats(request) and roster.admission.fits(request, alone=False):
                return
            self._preempt(roster.running[-1])

    def _has_seats(self, request: RequestState) -> bool:
        return self.roster.seats + request.n <= self.config.max_num_seqs

    def _preempt(self, request: RequestState) -> None:
        # What it took from the prefix cache in this step may have yet to be computed: not to be
        # copied before the step
        swap = self.config.preemption == "swap" and request is not self._reuser
        self.roster.preempt(request, swap, self.plan.copies)
