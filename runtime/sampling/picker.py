"""The tokens of one step: what the requests of its rows ask for, as tensors, and the draw.

What a row asks for stays the same while it runs, so its tensors are made once for as long as the
same rows come back; only histories, positions and grammars change from step to step. Nothing waits
for the device before all results are read, which come to the host in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..sampler import accept_or_draw, probabilities, sample, sampling_batch
from ..transfers import Incoming, moved, on_device
from .adjust import add_bias_, allow_, ban_, penalize_
from .logprobs import TokenLogprobs, TopLogprobs, as_dicts, top_logprobs
from .philox import as_int64, uniforms

if TYPE_CHECKING:
    from ..request import Continuation

NOT_FINITE = -1  # in the place of a token
Ahead = Sequence[Sequence[int]]


class Picked(NamedTuple):
    """tokens: of each row, NOT_FINITE where its logits were not. logprobs: of the rows that asked
    for them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Proposed(NamedTuple):
    """What the rows of a step have to do with proposed tokens. ahead: of each row, those that stand
    between its continuation's last token and the one it draws. rows, tokens: int64 [m], rows whose
    next token was drawn from probs, float64 [m, vocabulary], and that token."""

    ahead: Sequence[Sequence[int]]
    rows: Tensor | None = None
    tokens: Tensor | None = None
    probs: Tensor | None = None


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
        self._telling = [i for i, count in enumerate(self._counts) if count is not None]
        self._bias = self._biased()
        self._penalized = [i for i, p in enumerate(params) if p.has_penalties]
        self._held_on = [i for i, p in enumerate(params) if p.min_tokens]
        self._guided = [i for i, c in enumerate(continuations) if c.grammar is not None]
        if self._penalized:
            self._penalties = [
                on_device(values, torch.float32, device)
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

    def uniforms(self, ahead: Ahead) -> Tensor:
        """float64 [rows, 2], of the positions that come next."""
        steps = torch.tensor(
            [len(c.token_ids) + len(a) for c, a in zip(self.continuations, ahead, strict=True)]
        )
        return moved(uniforms(self._seeds, steps, self._streams), self.device)

    def adjusted(self, logits: Tensor, ahead: Ahead) -> Tensor:
        """The logits that are drawn from; `logits` itself where nobody asks for others."""
        each = self.continuations
        held_on = [i for i in self._held_on if each[i].must_go_on(len(ahead[i]))]
        if not (self._bias or self._penalized or self._guided or held_on):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self._guided:
            self._guide(logits, ahead)
        if self._bias:
            add_bias_(logits, *self._bias)
        if held_on:
            ends = ((i, sorted(each[i].request.end_token_ids)) for i in held_on)
            ban_(logits, moved(self._places(ends), self.device))
        if self._penalized:
            outputs = ((i, [*each[i].token_ids, *ahead[i]]) for i in self._penalized)
            penalize_(logits, self._prompts, self._places(outputs), *self._penalties)
        return logits

    def asked(self, logits: Tensor, tokens: Tensor) -> TopLogprobs | None:
        """Of the tokens int64 [rows], what their requests want to know; None: nothing."""
        if not self._telling:
            return None
        counts = [self._counts[i] or 0 for i in self._telling]
        at = on_device(self._telling, torch.int64, self.device)
        return top_logprobs(logits[at], tokens[at], -1 if min(counts) < 0 else max(counts))

    def told(self, ids: list[int], top: Sequence[list[Any]]) -> list[TokenLogprobs | None]:
        """Of the tokens `ids` what is in `top`, which `asked` gave, on the host."""
        told: list[TokenLogprobs | None] = [None] * len(ids)
        rows = self._telling
        if not rows:
            return told
        counts = [self._counts[i] or 0 for i in rows]
        tokenizer = self.continuations[0].request.tokenizer
        for i, entry in zip(
            rows, as_dicts(top, [ids[i] for i in rows], counts, tokenizer), strict=True
        ):
            told[i] = entry
        return told

    def _guide(self, logits: Tensor, ahead: Ahead) -> None:
        rows = on_device(self._guided, torch.int64, self.device)
        masks = [
            grammar.allowed(ahead[i])
            for i in self._guided
            if (grammar := self.continuations[i].grammar) is not None
        ]
        allow_(logits, rows, moved(torch.stack(masks), self.device))

    def _biased(self) -> tuple[Tensor, Tensor] | None:
        biases = [(i, c.request.params.logit_bias) for i, c in enumerate(self.continuations)]
        given = [(i, list(b), list(b.values())) for i, b in biases if b]
        if not given:
            return None
        values = [value for _, _, row in given for value in row]
        at = self._places((i, ids) for i, ids, _ in given)
        return moved(at, self.device), on_device(values, torch.float32, self.device)

    def _places(self, rows_and_ids: Iterable[tuple[int, Sequence[int]]]) -> Tensor:
        """Of (row, token ids): int64 of the host, where these lie in the flattened logits."""
        parts = [
            torch.tensor(ids, dtype=torch.int64) + row * self.vocabulary
            for row, ids in rows_and_ids
        ]
        empty = torch.empty(0, dtype=torch.int64)
        return torch.cat([empty, *parts])


class Drawn:
    """Tokens that were drawn and are on their way to the host. tokens: int64 [rows], on the device,
    NOT_FINITE where a row's logits were not; None without rows."""

    def __init__(
        self, rows: Rows | None, tokens: Tensor | None, top: TopLogprobs | None,
        also: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self._rows, self.tokens, self._others = rows, tokens, len(also)
        own = [] if tokens is None else [tokens]
        self._incoming = Incoming([*also, *own, *(top or ())])

    def read(self) -> tuple[Picked, list[list[Any]]]:
        """The tokens, and the numbers of the tensors that came with them. The host waits here."""
        numbers = self._incoming.read()
        also = numbers[: self._others]
        if self._rows is None:
            return Picked([], []), also
        ids, *top = numbers[self._others :]
        return Picked(ids, self._rows.told(ids, top)), also


def pick(logits: Tensor, rows: Rows, proposed: Proposed | None = None) -> Picked:
    """The next token of each continuation of `rows`; see `draw_tokens`."""
    return draw_tokens(logits, rows, proposed).read()[0]


@torch.inference_mode()
def draw_tokens(
    logits: Tensor, rows: Rows, proposed: Proposed | None = None, also: Sequence[Tensor] = ()
) -> Drawn:
    """The next token of each continuation of `rows` from logits [rows, vocabulary].

    A continuation may stand in several rows, each for the case that the tokens `ahead` of it come.
    also: what is to come to the host in the same copy.
    """
    ahead = [()] * len(rows.continuations) if proposed is None else proposed.ahead
    changed = rows.adjusted(logits, ahead)
    numbers = logits.new_empty(0, 2) if rows.batch.all_greedy else rows.uniforms(ahead)
    tokens = sample(changed, rows.batch, numbers[:, 0])
    if proposed is not None and proposed.rows is not None:
        tokens[proposed.rows] = _verified(changed, rows, proposed, numbers)
    finite = torch.isfinite(logits.amax(dim=-1))
    top = rows.asked(logits, tokens)
    return Drawn(rows, torch.where(finite, tokens, NOT_FINITE), top, also)


def _verified(logits: Tensor, rows: Rows, proposed: Proposed, numbers: Tensor) -> Tensor:
    """The tokens of the rows whose proposals were drawn."""
    at, tokens, draft = proposed.rows, proposed.tokens, proposed.probs
    assert at is not None and tokens is not None and draft is not None
    batch = rows.batch
    part = batch._replace(**{
        name: getattr(batch, name)[at] for name in ("temperature", "top_k", "top_p", "min_p")
    })  # fmt: skip
    target = probabilities(logits[at], part)
    return accept_or_draw(target, draft, tokens, numbers.to(target.device)[at])
