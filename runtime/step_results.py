"""What comes of a step: from the logits of its runs to the tokens of requests, and to what the
scheduler hears of them.

Most runs draw one token, the run in which continuations part draws one for each, and beams choose
among all their ways on. Where logits are not finite the request fails, and no other notices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .engine import fail_not_finite
from .request import Continuation, Request
from .sampling.beams import BeamRequest
from .sampling.picker import NOT_FINITE, Rows, pick
from .scheduling.block_allocator import NULL_BLOCK
from .scheduling.plan import SequenceRun, StepPlan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import RequestState, Sequence

Wipe = Callable[[int, list[int]], None]


class Live(NamedTuple):
    """A request that is not over: what was asked, and what the scheduler knows of it."""

    request: Request | BeamRequest
    state: RequestState


class Asked(NamedTuple):
    """A run that logits were computed for."""

    run: SequenceRun
    live: Live


class StepResults:
    """dtype: of the model. wipe: zeros in blocks of a kind of layers, (kind, blocks)."""

    def __init__(self, scheduler: Scheduler, dtype: torch.dtype, wipe: Wipe) -> None:
        self._scheduler, self._dtype, self._wipe = scheduler, dtype, wipe
        self._rows: Rows | None = None

    def advance(
        self, plan: StepPlan, asked: list[Asked], logits: Tensor, broken: list[Live]
    ) -> int:
        """Draw, and tell the scheduler and the requests; how many tokens were drawn.

        logits: [asked, vocabulary], after the last token of each of these runs of `plan`. broken:
        whose prompts were found to be not finite.
        """
        broken = list(broken)
        if not asked:
            self._fail(broken)
            self._scheduler.update(plan, [[] for _ in plan.runs])
            return 0
        draws = _draws(asked)
        rows, continuations = [row for row, _ in draws], [c for _, c in draws]
        if self._rows is None or self._rows.continuations != continuations:
            self._rows = Rows(continuations, logits.shape[1], logits.device)
        drawn_from = logits if rows == list(range(len(logits))) else logits[rows]
        tokens, told = pick(drawn_from, self._rows) if draws else ([], [])
        new: dict[int, list[int]] = {}  # of the run with this id
        for row, token in zip(rows, tokens, strict=True):
            new.setdefault(id(asked[row].run), []).append(token)
            if token == NOT_FINITE:
                broken.append(asked[row].live)
        choices = self._choose(asked, logits, broken)
        self._fail(broken)
        self._scheduler.update(plan, [new.get(id(run), []) for run in plan.runs])
        for state, chosen in choices:
            self._scheduler.advance_beams(state, chosen)
        for row, continuation, token, entry in zip(rows, continuations, tokens, told, strict=True):
            if continuation.finish_reason is not None:
                continue  # its request has failed
            continuation.append(token, entry)
            sequence = asked[row].live.state.sequences[continuation.index]
            if continuation.finish_reason and sequence.finish_reason is None:
                self._scheduler.finish(sequence, "stop")
        return len(tokens) + sum(len(chosen) for _, chosen in choices)

    def _choose(
        self, asked: list[Asked], logits: Tensor, broken: list[Live]
    ) -> list[tuple[RequestState, list[tuple[Sequence, int]]]]:
        """How the beams of each request go on; those whose logits are not finite are `broken`."""
        lives = {a.live.request: a.live for a in asked if isinstance(a.live.request, BeamRequest)}
        row_of = {a.run.sequence: row for row, a in enumerate(asked)} if lives else {}
        choices = []
        for request, live in lives.items():
            assert isinstance(request, BeamRequest)
            beams = live.state.sequences
            chosen = request.choose(logits[[row_of[beam] for beam in beams]])
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


def _draws(asked: list[Asked]) -> list[tuple[int, Continuation]]:
    """Of each row of logits, the continuations that draw from it; beams do not draw."""
    draws: list[tuple[int, Continuation]] = []
    for row, (run, (request, state)) in enumerate(asked):
        if isinstance(request, BeamRequest):
            continue
        if run.num_draws > 1:
            draws += [(row, continuation) for continuation in request.continuations]
        else:
            draws.append((row, request.continuations[state.sequences.index(run.sequence)]))
    return draws
