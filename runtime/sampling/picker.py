"""The tokens of one step: what the requests of its rows ask for, as tensors, and the draw.

What a row asks for stays the same while it runs, so its tensors are made once for as long as the
same rows come back; only histories, positions and grammars change from step to step. All results
come to the host in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..sampler import sample, sampling_batch
from .adjust import add_bias_, allow_, ban_, penalize_
from .logprobs import TokenLogprobs, as_dicts, top_logprobs
from .philox import as_int64, uniforms

if TYPE_CHECKING:
    from ..request import Continuation

NOT_FINITE = -1  # in the place of a token


class Picked(NamedTuple):
    """tokens: of each row, NOT_FINITE where its logits were not. logprobs: of the rows that asked
    for them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Rows:
    """The continuations that draw from the rows of logits [rows, vocabulary], in their order."""

    def __init__(
        self, continuations: Sequence[Continuation], vocabulary: int, device: torch.device
    ) -> None:
        self.continuations = list(continuations)
        self.vocabulary, self.device = vocabulary, device
        params = [c.request.params for c in continuations]
        self.batch = sampling_batch(params, device)
        self._seeds = as_int64(c.request.seed for c in continuations)
        self._streams = torch.tensor([c.index for c in continuations])
        self._counts = [p.logprobs for p in params]
        self._bias = self._biased()
        self._penalized = [i for i, p in enumerate(params) if p.has_penalties]
        self._held_on = [i for i, p in enumerate(params) if p.min_tokens]
        self._guided = [i for i, c in enumerate(continuations) if c.grammar is not None]
        if self._penalized:
            self._penalties = [
                torch.tensor(values, dtype=torch.float32, device=device)
                for values in zip(
                    *((p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
                      for p in params),
                    strict=True,
                )
            ]  # fmt: skip
            self._prompts = self._places(
                (i, sorted(set(continuations[i].request.prompt_token_ids)))
                for i in self._penalized
                if params[i].reads_prompt
            )

    def uniforms(self) -> Tensor:
        """float64 [rows, 2], of the positions that come next."""
        steps = torch.tensor([len(c.token_ids) for c in self.continuations])
        return uniforms(self._seeds, steps, self._streams).to(self.device, non_blocking=True)

    def adjusted(self, logits: Tensor) -> Tensor:
        """The logits that are drawn from; `logits` itself where nobody asks for others."""
        held_on = [i for i in self._held_on if self.continuations[i].must_go_on]
        if not (self._bias or self._penalized or self._guided or held_on):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self._guided:
            self._guide(logits)
        if self._bias:
            add_bias_(logits, *self._bias)
        if held_on:
            ends = ((i, sorted(self.continuations[i].request.end_token_ids)) for i in held_on)
            ban_(logits, self._places(ends))
        if self._penalized:
            outputs = self._places((i, self.continuations[i].token_ids) for i in self._penalized)
            penalize_(logits, self._prompts, outputs, *self._penalties)
        return logits

    def told(self, logits: Tensor, tokens: Tensor, ids: list[int]) -> list[TokenLogprobs | None]:
        """Of the tokens int64 [rows], `ids` on the host, what their requests want to know."""
        told: list[TokenLogprobs | None] = [None] * len(ids)
        rows = [i for i, count in enumerate(self._counts) if count is not None]
        if not rows:
            return told
        counts = [self._counts[i] or 0 for i in rows]
        at = torch.tensor(rows, device=self.device)
        top = top_logprobs(logits[at], tokens[at], -1 if min(counts) < 0 else max(counts))
        tokenizer = self.continuations[0].request.tokenizer
        for i, entry in zip(
            rows, as_dicts(top, [ids[i] for i in rows], counts, tokenizer), strict=True
        ):
            told[i] = entry
        return told

    def _guide(self, logits: Tensor) -> None:
        grammars = [g for i in self._guided if (g := self.continuations[i].grammar) is not None]
        rows = torch.tensor(self._guided, device=self.device)
        bitmask = torch.stack([grammar.allowed() for grammar in grammars])
        allow_(logits, rows, bitmask.to(self.device))

    def _biased(self) -> tuple[Tensor, Tensor] | None:
        biases = [(i, c.request.params.logit_bias) for i, c in enumerate(self.continuations)]
        given = [(i, list(b), list(b.values())) for i, b in biases if b]
        if not given:
            return None
        values = [value for _, _, row in given for value in row]
        at = self._places((i, ids) for i, ids, _ in given)
        return at, torch.tensor(values, dtype=torch.float32, device=self.device)

    def _places(self, rows_and_ids: Iterable[tuple[int, Sequence[int]]]) -> Tensor:
        """Of (row, token ids): int64, where these tokens lie in the flattened logits."""
        parts = [
            torch.tensor(ids, dtype=torch.int64) + row * self.vocabulary
            for row, ids in rows_and_ids
        ]
        empty = torch.empty(0, dtype=torch.int64)
        return torch.cat([empty, *parts]).to(self.device, non_blocking=True)


@torch.inference_mode()
def pick(logits: Tensor, rows: Rows) -> Picked:
    """The next token of each continuation of `rows` from logits [rows, vocabulary]."""
    changed = rows.adjusted(logits)
    numbers = torch.empty(0) if rows.batch.all_greedy else rows.uniforms()[:, 0]
    tokens = sample(changed, rows.batch, numbers)
    finite = torch.isfinite(logits.amax(dim=-1))
    ids = torch.where(finite, tokens, NOT_FINITE).tolist()
    return Picked(ids, rows.told(logits, tokens, ids))
