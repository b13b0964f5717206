"""A plan on the device: keys and values are stored, logits computed, and the host does not wait."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..kernels.row_tiles import row_tiles
from .eviction import Evictor
from .graphs import DecodeGraphs, DecodeNumbers
from .kv_pools import PagedKV
from .models.choice import AnyDecoder
from .request import Request
from .sampling.beams import BeamRequest
from .sampling.logprobs import add_prompt_logprobs
from .scheduling.plan import UNKNOWN_TOKEN, SequenceRun, StepPlan
from .scheduling.sequence import Sequence
from .step_inputs import step_inputs
from .step_results import Live

HEAD_ROWS = 256  # of a prompt's hidden states whose logits are in memory at once


class Unread(NamedTuple):
    """tokens: int64, drawn in the step before, on the device. rows: of each sequence, which of
    them is its own."""

    tokens: Tensor
    rows: Mapping[Sequence, int]


class PromptPart(NamedTuple):
    """Tokens of a prompt, all of whose hidden states are looked at; end: behind its last one among
    the tokens of the step."""

    run: SequenceRun
    live: Live
    end: int

    @property
    def tokens(self) -> int:
        return self.run.end - self.run.start


class Ran(NamedTuple):
    """logits: [rows, vocabulary], after the last tokens of each run, as many as it is asked for.
    hidden: [tokens, hidden] of `parts`, one after the other; finite: bool [tokens], whether they
    are, None without parts."""

    logits: Tensor
    parts: list[PromptPart]
    hidden: Tensor
    finite: Tensor | None


class StepRunner:
    """kv: whose pools are written to. evictor: who looks at attention, None: nobody. graphs: for
    steps that only decode, None: there are none."""

    def __init__(
        self,
        decoder: AnyDecoder,
        kv: PagedKV,
        device: torch.device,
        batch_invariant: bool,
        evictor: Evictor | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.decoder, self.graphs = decoder, graphs
        self._kv, self._device, self._evictor = kv, device, evictor
        self._batch_invariant = batch_invariant

    @torch.inference_mode()
    def run(self, plan: StepPlan, lives: Seq[Live], unread: Unread | None = None) -> Ran:
        """What `plan` gives, whose requests are `lives`. unread: the tokens that it does not know.

        A key or value that is not finite makes its token's hidden state so. Seen of the step that
        stores it, it is wiped before another request can get its block.
        """
        self._kv.copy(plan.copies)  # K and V are stored even where nobody asks
        query_lens = [run.end - run.start for run in plan.runs]
        ends = list(itertools.accumulate(query_lens))
        rows = [
            row for end, run in zip(ends, plan.runs, strict=True)
            for row in range(end - run.num_logits, end)
        ]  # fmt: skip
        parts = [
            PromptPart(run, live, end)
            for run, live, end in zip(plan.runs, lives, ends, strict=True)
            if run.end - run.start > run.num_logits or wants_logits(live.request)
        ]
        decodes = not parts and len(rows) == ends[-1] == len(plan.runs)
        if decodes and (logits := self._replayed(plan, unread)) is not None:
            return Ran(logits, parts, logits[:0], None)
        asked = len(rows)
        rows += [row for part in parts for row in range(part.end - part.tokens, part.end)]
        with row_tiles(self._batch_invariant):
            hidden = self._hidden(plan, query_lens, rows, unread)
            finite = torch.isfinite(hidden[asked:]).all(dim=-1) if parts else None
            return Ran(self.decoder.logits(hidden[:asked]), parts, hidden[asked:], finite)

    @torch.inference_mode()
    def tell_prompts(self, ran: Ran, finite: Seq[bool]) -> list[Live]:
        """Tell prompts' own logits to the requests that want them. finite: `ran.finite`, on the
        host. Returns whose prompts are broken."""
        broken, begin = [], 0
        for run, live, _ in ran.parts:
            end = begin + run.end - run.start
            if not all(finite[begin:end]):
                broken.append(live)
            elif wants_logits(live.request):
                for first in range(begin, end, HEAD_ROWS):
                    logits = self.decoder.logits(ran.hidden[first : min(first + HEAD_ROWS, end)])
                    add_prompt_logprobs(live.request, run.start + first - begin, logits)
            begin = end
        return broken

    def _hidden(
        self, plan: StepPlan, query_lens: list[int], rows: list[int], unread: Unread | None
    ) -> Tensor:
        """[rows, hidden] of these tokens of the step."""
        every = rows == list(range(len(plan.token_ids)))
        evicted = zip(*(run.sequence.table.evicted for run in plan.runs), strict=True)
        step = step_inputs(
            plan.token_ids if unread is None else _with_places(plan, unread),
            plan.positions, plan.slots, query_lens, [run.end for run in plan.runs],
            _tables(plan), self._device, list(evicted), self._batch_invariant,
            None if every else rows,
        )  # fmt: skip
        batches = step.batches
        if self._evictor is not None:
            batches = self._evictor.watch(plan, batches)
        ids = step.token_ids if unread is None else _taken(step.token_ids, unread)
        return self.decoder(ids, self._kv.pools, batches, step.new, step.rows)

    def _replayed(self, plan: StepPlan, unread: Unread | None) -> Tensor | None:
        """Logits of a step that only decodes, by a graph; None where there is none for it."""
        if self.graphs is None:
            return None
        lengths = [run.end for run in plan.runs]
        form = self.graphs.form(len(lengths), max(lengths))
        if form is None:
            return None
        ids = plan.token_ids if unread is None else _with_places(plan, unread)
        numbers = DecodeNumbers(ids, plan.positions, plan.slots, lengths, _tables(plan))
        change = None if unread is None else lambda told: _taken(told, unread)
        return self.graphs.logits(form, numbers, change)


def wants_logits(request: Request | BeamRequest) -> TypeGuard[Request]:
    """Of its prompt, too."""
    return isinstance(request, Request) and request.wants_prompt_logprobs


def _tables(plan: StepPlan) -> list[Seq[Seq[int]]]:
    """Of each kind, the blocks of each run."""
    return list(zip(*(run.block_tables for run in plan.runs), strict=True))


def _with_places(plan: StepPlan, unread: Unread) -> list[int]:
    """The token ids of a step, -1 - row in the place of those that are in a row of `unread`."""
    ids, at = plan.token_ids.tolist(), 0
    for run in plan.runs:
        at += run.end - run.start
        if ids[at - 1] == UNKNOWN_TOKEN:
            ids[at - 1] = -1 - unread.rows[run.sequence]
    return ids


def _taken(ids: Tensor, unread: Unread) -> Tensor:
    """int64, as `ids`, those below 0 taken out of `unread`. A token that could not be drawn is 0:
    its request ends as soon as that is read."""
    rows = (-1 - ids).clamp_(min=0)
    return torch.where(ids < 0, unread.tokens.clamp(min=0)[rows], ids)
