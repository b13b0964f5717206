"""Whether a run may be believed: all answers whole, and each token one that the model would say.

A token is right where its logit, of one forward pass over prompt and answer without a cache, falls
short of the likeliest token's by no more than a twentieth of what that stands above the mean: other
orders of summing (batches, chunks, kernels) decide near-ties, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .latency import Timeline
from .load import Job

MARGIN = 0.05  # of the distance between the highest logit and the mean one
BAR = 0.95  # of the tokens that must be right
BAR_QUANTIZED = 0.75  # where the cache is quantized, which the pass without one does not see
REQUESTS, TOKENS = 4, 1024  # of a run that are looked at, at most; prompts count, too
Logits = Callable[[Tensor], Tensor]


class Check(NamedTuple):
    """requests: that were whole. tokens: whose logits were looked at, none where only a server
    knows them; agreement: the share of them that was right; bar: the share that had to be. failed:
    why no number of the run is to be believed."""

    requests: int
    tokens: int
    agreement: float | None
    bar: float | None
    failed: str | None = None


def whole(jobs: Sequence[Job], requests: Sequence[Timeline]) -> str | None:
    """None, or which answer is not the one that was asked for."""
    for number, (job, got) in enumerate(zip(jobs, requests, strict=True), 1):
        if got.error is not None:
            return f"request {number} failed: {got.error}"
        if got.tokens != job.output or not got.times:
            return f"request {number} gave {got.tokens} of {job.output} tokens"
    return None


def checked(
    jobs: Sequence[Job], requests: Sequence[Timeline], logits: Logits | None, quantized: bool
) -> Check:
    """The check of a run. logits: of token rows int64 [1, n], as [1, n, vocabulary]; None where
    nobody can say. quantized: whether the cache was."""
    if (why := whole(jobs, requests)) is not None:
        return Check(0, 0, None, None, why)
    if logits is None:
        return Check(len(requests), 0, None, None)
    right = [r for request in _looked_at(requests) for r in right_tokens(request, logits)]
    bar, share = BAR_QUANTIZED if quantized else BAR, sum(right) / len(right)
    failed = None
    if share < bar:
        failed = f"{share:.1%} of the tokens are the model's own, and {bar:.0%} have to be"
    return Check(len(requests), len(right), share, bar, failed)


def right_tokens(request: Timeline, logits: Logits) -> list[bool]:
    """Of each token of an answer."""
    assert request.token_ids
    ids = torch.tensor([[*request.prompt, *request.token_ids]])
    asked = logits(ids[:, :-1])[0, len(request.prompt) - 1 :].float().cpu()
    highest = asked.max(dim=-1).values
    chosen = asked.gather(1, torch.tensor(request.token_ids)[:, None])[:, 0]
    return (highest - chosen <= MARGIN * (highest - asked.mean(dim=-1))).tolist()


def _looked_at(requests: Sequence[Timeline]) -> list[Timeline]:
    """The first ones that are within the limit, and the first in any case."""
    found, tokens = [requests[0]], 0
    for request in requests[1:REQUESTS]:
        tokens += len(request.prompt) + request.tokens
        if tokens <= TOKENS:
            found.append(request)
    return found
