"""What comes of a step: from the logits of its runs to the tokens of requests, and to what the
scheduler hears of them.

Most runs draw one token, the run in which continuations part draws one for each, and beams choose
among all their ways on. Where logits are not finite the request fails, and no other notices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .engine import fail_not_finite
from .request import Continuation, Request
from .sampling.beams import BeamRequest
from .sampling.logprobs import TokenLogprobs
from .sampling.picker import NOT_FINITE, Drawn, Picked, Proposed, Rows, draw_tokens
from .scheduling.block_allocator import NULL_BLOCK
from .scheduling.plan import UNKNOWN_TOKEN, SequenceRun, StepPlan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import RequestState, Sequence
from .speculation.proposer import Verified
from .transfers import on_device

if TYPE_CHECKING:
    from .speculation.speculator import Speculator

Wipe = Callable[[int, list[int]], None]


class Live(NamedTuple):
    """A request that is not over: what was asked, and what the scheduler knows of it."""

    request: Request | BeamRequest
    state: RequestState


class Asked(NamedTuple):
    """A run that logits were computed for, its first row of them."""

    run: SequenceRun
    live: Live
    first: int


def asked_of(plan: StepPlan, lives: list[Live]) -> list[Asked]:
    """The runs of a plan that logits are computed for."""
    asked, first = [], 0
    for run, live in zip(plan.runs, lives, strict=True):
        if run.num_logits:
            asked.append(Asked(run, live, first))
            first += run.num_logits
    return asked


class Draw(NamedTuple):
    """A token to draw from a row of logits. ahead: proposed tokens between the continuation's last
    one and this. pending: tokens before those that are drawn and not read yet."""

    row: int
    run: SequenceRun
    continuation: Continuation
    ahead: list[int]
    pending: int = 0


class Drawing(NamedTuple):
    """What is drawn in a step: `drawn` has a token for each of `draws`."""

    draws: list[Draw]
    drawn: Drawn

    @property
    def rows(self) -> dict[Sequence, int]:
        """The place of each sequence's token among those that are drawn."""
        return {draw.run.sequence: row for row, draw in enumerate(self.draws)}

    def read(self) -> tuple[Picked, list[list[Any]]]:
        """See Drawn."""
        return self.drawn.read()


class StepResults:
    """dtype: of the model. wipe: zeros in blocks of a kind of layers, (kind, blocks). speculator:
    whose proposals runs may verify."""

    def __init__(
        self,
        scheduler: Scheduler,
        dtype: torch.dtype,
        wipe: Wipe,
        speculator: Speculator | None = None,
    ) -> None:
        self._scheduler, self._dtype, self._wipe = scheduler, dtype, wipe
        self._speculator = speculator
        self._rows: Rows | None = None

    def draw(self, asked: list[Asked], logits: Tensor, also: Seq[Tensor] = ()) -> Drawing:
        """Draw from logits [rows, vocabulary], after the last tokens of these runs of a plan; the
        host does not wait. also: what is to be read with the tokens."""
        draws = [draw for each in asked for draw in _draws(each)]
        if not draws:
            return Drawing(draws, Drawn(None, None, None, also))
        continuations = [draw.continuation for draw in draws]
        if self._rows is None or self._rows.continuations != continuations:
            self._rows = Rows(continuations, logits.shape[1], logits.device)
        rows = [draw.row for draw in draws]
        if rows != list(range(len(logits))):
            logits = logits[on_device(rows, torch.int64, logits.device)]
        proposed = self._proposed(draws, logits.device)
        return Drawing(draws, draw_tokens(logits, self._rows, proposed, also))

    def advance(
        self, plan: StepPlan, asked: list[Asked], logits: Tensor, drawing: Drawing, picked: Picked,
        broken: list[Live],
    ) -> list[int]:  # fmt: skip
        """Tell the scheduler and the requests what was picked; how many tokens came of each run.

        drawing: of `draw`, picked: what was read of it. broken: whose prompts were found to be not
        finite.
        """
        broken = list(broken)
        draws, (tokens, told) = drawing.draws, picked
        lives = {id(each.run): each.live for each in asked}
        broken += [lives[id(d.run)] for d, t in zip(draws, tokens, strict=True) if t == NOT_FINITE]
        choices = self._choose(asked, logits, broken)
        self._fail(broken)
        new = _take(draws, tokens, told)
        self._scheduler.update(plan, [new.get(id(run), []) for run in plan.runs])
        for state, chosen in choices:
            self._scheduler.advance_beams(state, chosen)
        for live in dict.fromkeys(lives.values()):
            self._finish(live)
        if self._speculator is not None:
            self._speculator.observe(_verified(asked, draws, logits, new))
        beams = Counter(id(beam) for _, chosen in choices for beam, _ in chosen)
        return [len(new.get(id(r), ())) or beams[id(r.sequence)] for r in plan.runs]

    def _proposed(self, draws: list[Draw], device: torch.device) -> Proposed | None:
        """What the draws have to do with proposals, and with tokens that nobody has read; None
        where there are neither."""
        ahead = [[UNKNOWN_TOKEN] * draw.pending + draw.ahead for draw in draws]
        if not any(ahead):
            return None
        if self._speculator is None:
            return Proposed(ahead)
        rows: list[int] = []
        tokens: list[int] = []
        probs: list[Tensor] = []
        for row, draw in enumerate(draws):
            proposal, place = self._speculator.proposal(draw.run), len(draw.ahead)
            if proposal.probs is not None and place < len(proposal.tokens):
                rows.append(row)
                tokens.append(proposal.tokens[place])
                probs.append(proposal.probs[place])
        if not rows:
            return Proposed(ahead)
        at, drawn = (on_device(values, torch.int64, device) for values in (rows, tokens))
        return Proposed(ahead, at, drawn, torch.stack(probs))

    def _finish(self, live: Live) -> None:
        """Tell the scheduler of the continuations of a request that have ended by themselves."""
        request, state = live
        if isinstance(request, BeamRequest) or state.is_over:
            return
        for continuation, sequence in zip(request.continuations, state.sequences, strict=False):
            if continuation.finish_reason and sequence.finish_reason is None:
                self._scheduler.finish(sequence, "stop")

    def _choose(
        self, asked: list[Asked], logits: Tensor, broken: list[Live]
    ) -> list[tuple[RequestState, list[tuple[Sequence, int]]]]:
        """How the beams of each request go on; those whose logits are not finite are `broken`."""
        lives = {a.live.request: a.live for a in asked if isinstance(a.live.request, BeamRequest)}
        row_of = {a.run.sequence: a.first for a in asked} if lives else {}
        choices = []
        for request, live in lives.items():
            assert isinstance(request, BeamRequest)
            beams = live.state.sequences
            rows = on_device([row_of[beam] for beam in beams], torch.int64, logits.device)
            chosen = request.choose(logits[rows])
            if chosen is None:
                broken.append(live)
            else:
                choices.append((live.state, [(beams[parent], token) for parent, token in chosen]))
        return choices

    def _fail(self, broken: list[Live]) -> None:
        """End requests whose logits are not finite, and wipe what they alone have stored: a key or
        value that is masked must not be NaN."""
        blocks = self._scheduler.blocks
        held: list[Counter[int]] = [Counter() for _ in blocks.allocators]
        for name, live in {live.request.request_id: live for live in broken}.items():
            fail_not_finite(live.request, self._dtype)
            self._scheduler.fail(name)
            for sequence in live.state.sequences:
                for counter, table in zip(held, sequence.table.blocks, strict=True):
                    counter.update(table)
        for kind, (counter, allocator) in enumerate(zip(held, blocks.allocators, strict=True)):
            del counter[NULL_BLOCK]
            refs, nodes = allocator.refs, allocator.nodes
            own = [b for b, count in counter.items() if refs[b] == count and nodes[b] is None]
            if own:
                self._wipe(kind, own)


def _draws(asked: Asked) -> list[Draw]:
    """Of the rows of a run, each with a continuation that draws from it; beams do not draw."""
    run, (request, state), row = asked
    if isinstance(request, BeamRequest):
        return []
    if run.num_draws > 1:
        return [Draw(row, run, continuation, []) for continuation in request.continuations]
    continuation = request.continuations[state.sequences.index(run.sequence)]
    sequence = run.sequence
    proposed = sequence.proposed[: run.num_proposed].tolist()
    pending = run.end - run.num_proposed - len(sequence.tokens)
    return [Draw(row + n, run, continuation, proposed[:n], pending) for n in range(run.num_logits)]


def _take(
    draws: list[Draw], tokens: list[int], told: list[TokenLogprobs | None]
) -> dict[int, list[int]]:
    """Give continuations their tokens, as far as what was proposed before each has come; by the
    run's id, those that it gave."""
    new: dict[int, list[int]] = {}
    for draw, token, entry in zip(draws, tokens, told, strict=True):
        _, run, continuation, ahead, _ = draw
        taken = new.setdefault(id(run), [])
        if continuation.finish_reason is None and (not ahead or ahead == taken):
            continuation.append(token, entry)
            taken.append(token)
    return new


def _verified(
    asked: list[Asked], draws: list[Draw], logits: Tensor, new: dict[int, list[int]]
) -> list[Verified]:
    """What each run of one continuation said, its last token and its proposals."""
    last = {id(draw.run): draw for draw in draws}
    verified = []
    for run, _, first in asked:
        count, taken = run.num_logits, new.get(id(run))
        if taken and run.num_draws == 1:
            draw = last[id(run)]
            tokens = [run.sequence.tokens[run.end - count], *draw.ahead]
            said = logits[first : first + count]
            verified.append(Verified(draw.continuation, tokens, said, len(taken) - 1))
    return verified
