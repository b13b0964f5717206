"""What the model thought of a token and of the likeliest ones beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..transfers import Incoming, on_device

if TYPE_CHECKING:
    from ..request import Request

_ROWS_AT_ONCE = 256  # of logits in float32: 50 MB for a vocabulary of 49 thousand


class Logprob(NamedTuple):
    """rank: 1 for the likeliest token. decoded_token: its text alone; None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


class TopLogprobs(NamedTuple):
    """logprob float32 [rows], rank int64 [rows] of the tokens that were asked about; ids int64
    [rows, k] and values float32 [rows, k] of the likeliest, falling."""

    logprob: Tensor
    rank: Tensor
    ids: Tensor
    values: Tensor


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> TopLogprobs:
    """Of tokens int64 [rows] and of the k likeliest of each row of logits [rows, vocabulary]; k -1:
    all."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    values, ids = logprobs.topk(logits.shape[1] if k < 0 else min(k, logits.shape[1]), dim=-1)
    return TopLogprobs(own.squeeze(1), (logprobs > own).sum(dim=-1) + 1, ids, values)


def as_dicts(
    top: Sequence[list[Any]], tokens: Sequence[int], counts: Sequence[int], tokenizer: Any | None
) -> list[TokenLogprobs]:
    """One for each row: its token first, then counts[row] of the likeliest (-1: all there are).
    top: what TopLogprobs has, on the host."""
    own, ranks, ids, values = top
    told: list[TokenLogprobs] = []
    for row, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        entry = {token: Logprob(own[row], ranks[row], _text(tokenizer, token))}
        width = len(ids[row]) if count < 0 else count
        for rank, (other, value) in enumerate(
            zip(ids[row][:width], values[row][:width], strict=True), 1
        ):
            if other not in entry:
                entry[other] = Logprob(value, rank, _text(tokenizer, other))
        told.append(entry)
    return told


@torch.inference_mode()
def add_prompt_logprobs(request: Request, start: int, logits: Tensor) -> None:
    """Take note of the prompt's tokens after position `start`, from logits [n, vocabulary] after
    the tokens from there on; nothing where they were not asked for or are known."""
    known, count = request.prompt_logprobs, request.params.prompt_logprobs
    if known is None or count is None:
        return
    targets = request.prompt_token_ids[len(known) : start + len(logits) + 1]
    for begin in range(0, len(targets), _ROWS_AT_ONCE):
        tokens = targets[begin : begin + _ROWS_AT_ONCE]
        first = len(known) - 1 - start
        asked = on_device(tokens, torch.int64, logits.device)
        top = Incoming(top_logprobs(logits[first : first + len(tokens)], asked, count)).read()
        known += as_dicts(top, tokens, [count] * len(tokens), request.tokenizer)


def _text(tokenizer: Any | None, token: int) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token])
