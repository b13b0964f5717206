"""Beam search: the most likely continuations as a whole, found a token at a time.

Each step every beam goes on with its likeliest tokens; the best of all ways together become the
beams of the next. A way that ends is set aside. The search is over when no way on can beat those.
Nothing is cut off that could still win: scores only fall with length, or are bounded by what the
longest output would make of them.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..detokenizer import text_after
from .params import BeamSearchParams

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class BeamSearchSequence:
    """tokens: of the prompt and the output; text: of the output. score: cum_logprob divided by the
    output's length to the power length_penalty, an end of sequence counted."""

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best first."""

    sequences: list[BeamSearchSequence]


class Ways(NamedTuple):
    """The best first. parents, tokens: int64 [n]; scores: float64 [n], sums of logprobs."""

    parents: Tensor
    tokens: Tensor
    scores: Tensor


def beam_ways(logits: Tensor, scores: Tensor, ends: Tensor, width: int) -> tuple[Ways, Ways]:
    """The `width` best ways on that do not end, and those that do: of each beam those among its
    width + max(width, ends) likeliest tokens.

    logits: [beams, vocabulary]; scores: float64 [beams], what each has so far; ends: int64 ids.
    """
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    most = min(width + max(width, len(ends)), logits.shape[1])
    values, ids = logprobs.topk(most, dim=-1)
    total = (scores.unsqueeze(1) + values).flatten()
    tokens = ids.flatten()
    parents = torch.arange(len(logits), device=logits.device).repeat_interleave(most)
    over = torch.isin(tokens, ends)

    def best(chosen: Tensor, count: int) -> Ways:
        at = chosen.nonzero().squeeze(1)
        at = at[total[at].argsort(descending=True, stable=True)[:count]]
        return Ways(parents[at], tokens[at], total[at])

    return best(~over, width), best(over, len(tokens))


class BeamRequest:
    """One prompt whose beams are on their way, with the face of a Request that engines see.

    continuations: as many as the beams that run together at most. priority: as of a Request.
    """

    priority: int = 0

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        tokenizer: Any | None,
    ) -> None:
        self.request_id = f"beams-{next(_NUMBERS)}"
        self.prompt_token_ids, self.params, self.max_tokens = prompt_token_ids, params, max_tokens
        self.continuations = range(params.beam_width)
        self.prompt_logprobs = None
        self.error: str | None = None
        self.finished = False
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.prefill_seconds = self.decode_seconds = 0.0
        self.num_cached_tokens = self.num_preemptions = 0
        self._tokenizer = tokenizer
        self._ends = torch.tensor(sorted(() if params.ignore_eos else eos_token_ids)).long()
        self._beams: list[list[int]] = [[]]
        self._scores = torch.zeros(1, dtype=torch.float64)
        self._over: list[tuple[float, float, list[int]]] = []  # score, sum, tokens

    def choose(self, logits: Tensor) -> list[tuple[int, int]] | None:
        """How the beams go on, (beam, token) of each of the next ones; none when the search is
        over. None where logits [beams, vocabulary] are not finite."""
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            return None
        scores = self._scores.to(logits.device)
        ends = self._ends.to(logits.device)
        ways, over = beam_ways(logits, scores, ends, self.params.beam_width)
        for parent, token, total in zip(*(part.tolist() for part in over), strict=True):
            tokens = [*self._beams[parent], token]
            self._over.append((self._score(total, len(tokens)), total, tokens))
        self._over = sorted(self._over, key=lambda o: -o[0])[: self.params.beam_width]
        chosen = list(zip(ways.parents.tolist(), ways.tokens.tolist(), strict=True))
        self._beams = [[*self._beams[parent], token] for parent, token in chosen]
        self._scores = ways.scores.cpu()
        if not chosen or self._nothing_better():
            self.finished = True
            return []
        self.finished = len(self._beams[0]) >= self.max_tokens
        return chosen

    def end(self, reason: str, error: str | None = None) -> None:
        self.error = self.error or error
        self.finished = True

    def output(self) -> BeamSearchOutput:
        sums = self._scores.tolist()
        going = [
            (self._score(total, len(tokens)), total, tokens)
            for total, tokens in zip(sums, self._beams, strict=True)
            if len(tokens) >= self.max_tokens
        ]
        best = sorted([*self._over, *going], key=lambda o: -o[0])[: self.params.beam_width]
        ends = set(self._ends.tolist())
        return BeamSearchOutput([
            BeamSearchSequence(
                [*self.prompt_token_ids, *tokens], total, score, self._text(tokens),
                "stop" if tokens[-1] in ends else "length",
            )
            for score, total, tokens in best
        ])  # fmt: skip

    def _score(self, total: float, length: int) -> float:
        return total / length**self.params.length_penalty

    def _nothing_better(self) -> bool:
        """No beam can still beat the worst of those that are over."""
        if len(self._over) < self.params.beam_width:
            return False
        longest = self.max_tokens if self.params.length_penalty > 0 else len(self._beams[0])
        return self._score(float(self._scores.max()), longest) <= self._over[-1][0]

    def _text(self, tokens: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        return text_after(self._tokenizer, self.prompt_token_ids, tokens)
