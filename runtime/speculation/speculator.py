"""What the engine holds of speculation: whom to ask for guesses, when, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...kernels.errors import UserError
from ..loader import LoadedModel, load
from ..metrics import SpeculationMetrics
from ..sampling.beams import BeamRequest
from ..scheduling.plan import SequenceRun, StepPlan
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence as SequenceState
from .draft_model import DraftModel
from .governor import Governor
from .lookahead import Lookahead
from .prompt_lookup import PromptLookup
from .proposer import Drafting, Proposal, Proposer, Verified

if TYPE_CHECKING:
    from ..step_results import Live

MOST = {"ngram": 6, "lookahead": 6}  # tokens a proposal, where nothing is said; else:
MOST_DRAFTED = 4


class Speculator:
    """Guesses by `proposer` for what a scheduler runs, as long as they pay."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.governor = proposer, Governor()
        self._given: dict[SequenceState, Proposal] = {}  # for the next step of each
        self._decoding = 0  # sequences that can take guesses in the next step
        self._steps = self._tokens = 0  # of continuations that verified, and what they got

    def propose(self, scheduler: Scheduler, live_of: Callable[[str], Live]) -> None:
        """Give the scheduler guesses for the next step."""
        self._given = {
            s: p for s, p in self._given.items() if s.proposed and not s.request.is_over
        }  # of those that were preempted before their step
        sequences = [
            s for r in scheduler.roster.running if not r.lockstep for s in r.sequences
            if s.num_generated and s.num_to_run == 1 and not s.unsettled and not s.finish_reason
        ]  # fmt: skip
        drafting = []
        for sequence in sequences:
            request = live_of(sequence.request.request_id).request
            assert not isinstance(request, BeamRequest)
            continuation = request.continuations[sequence.request.sequences.index(sequence)]
            most = sequence.request.max_tokens - sequence.num_generated - 1
            most = min(most, self.proposer.most)
            drafting.append(Drafting(continuation, sequence.tokens, most))
        self._decoding = len(drafting)
        if not drafting or not self.governor.wants(len(drafting)):
            return
        asked = [(s, d) for s, d in zip(sequences, drafting, strict=True) if d.most > 0]
        proposals = self.proposer.propose([d for _, d in asked])
        for (sequence, _), proposal in zip(asked, proposals, strict=True):
            if proposal.tokens:
                self._given[sequence] = proposal
                scheduler.propose(sequence, proposal.tokens)

    def proposal(self, run: SequenceRun) -> Proposal:
        """What `run` verifies, cut to what there was room for."""
        if not run.num_proposed:
            return Proposal([])
        tokens, probs = self._given[run.sequence]
        count = run.num_proposed
        return Proposal(tokens[:count], None if probs is None else probs[:count])

    def observe(self, verified: Sequence[Verified]) -> None:
        for each in verified:
            if len(each.tokens) > 1:
                self._steps += 1
                self._tokens += each.accepted + 1
        if self.governor.is_on:
            self.proposer.observe(verified)

    def record(self, plan: StepPlan, seconds: float, tokens: int) -> None:
        """A step with its proposals took so long and gave so many tokens."""
        decodes = sum(r.num_logits == r.end - r.start for r in plan.runs)
        if decodes == len(plan.runs) == self._decoding:  # and nothing else ran
            self.governor.record(decodes, seconds, tokens)

    def metrics(self, proposed: int, accepted: int) -> SpeculationMetrics:
        """proposed, accepted: tokens so far."""
        speeds, governor = self.governor.speeds(), self.governor
        return SpeculationMetrics(
            method=self.proposer.name,
            active=governor.is_on,
            proposed=proposed,
            accepted=accepted,
            acceptance_rate=accepted / proposed if proposed else 0.0,
            tokens_per_step=self._tokens / self._steps if self._steps else 1.0,
            speedup=speeds.speedup,
            note=self._note(),
        )

    def _note(self) -> str:
        speeds, governor = self.governor.speeds(), self.governor
        at = f"at {speeds.sequences} running"
        if speeds.speedup is None or speeds.plain is None or speeds.speculative is None:
            return f"{at}: not measured yet"
        word = "being compared" if governor.is_trying else "on" if governor.is_on else "off"
        return (
            f"{word} {at}: {speeds.speculative:.1f} tokens/s with proposals, "
            f"{speeds.plain:.1f} without"
        )


def make_proposer(
    method: str, most: int | None, target: LoadedModel, vocabulary: int, max_len: int
) -> Proposer:
    """method: "ngram", "lookahead", or the folder of a draft model, which is loaded. most: tokens a
    proposal (None: as the method likes). UserError for what cannot be used."""
    if most is not None and most < 1:
        raise UserError(f"num_speculative_tokens must be at least 1, got {most}")
    most = most or MOST.get(method, MOST_DRAFTED)
    if method == "ngram":
        return PromptLookup(most)
    if method == "lookahead":
        return Lookahead(most)
    draft = load(method, target.device)
    return DraftModel(method, draft, target.tokenizer, vocabulary, most, max_len)
