"""Pick the next token: pure functions of tensors, a row for each draw.

Temperature, then min-p, then top-k, then top-p over what is left, then one draw by inverting the
cumulative distribution in token order. The uniform number behind a draw is a function of the
request's seed and the position (sampling/philox.py), and every operation works along a row. So a
request's tokens do not depend on what else is in the batch, and a request that is preempted and
computed again draws the same. Probabilities are float64: the 49 thousand terms of a vocabulary add
up to 1 closely enough for exact top-p cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling.params import SamplingParams
from .transfers import on_device

_FIRST_WIDTH = 64


class SamplingBatch(NamedTuple):
    """Of the rows. temperature, top_p, min_p: float64 [B]; top_k: int64 [B], 0: off; max_top_k:
    the largest of them, 0: all are off."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    all_greedy: bool
    max_top_k: int
    any_top_p: bool
    any_min_p: bool


def sampling_batch(params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
    """The tensors of `params`, one row each. A top_k of -1 becomes 0."""
    top_k = [max(p.top_k, 0) for p in params]
    floats = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    temperature, top_p, min_p = on_device(floats, torch.float64, device)
    return SamplingBatch(
        temperature,
        on_device(top_k, torch.int64, device),
        top_p,
        min_p,
        all(p.temperature == 0 for p in params),
        max(top_k),
        any(p.top_p < 1 for p in params),
        any(p.min_p > 0 for p in params),
    )


def sample(logits: Tensor, batch: SamplingBatch, uniforms: Tensor) -> Tensor:
    """Token ids int64 [B] from logits [B, vocabulary]; row b is greedy where its temperature is 0.

    uniforms: float64 [B] in [0, 1), see sampling/philox.py; not looked at where all are greedy.
    """
    greedy = logits.argmax(dim=-1)
    if batch.all_greedy:
        return greedy
    drawn = draw(probabilities(logits, batch), uniforms)
    return torch.where(batch.temperature == 0, greedy, drawn)


def probabilities(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The distribution that a draw is made from, float64 [B, vocabulary]; 0 where cut off. Where
    the temperature is 0: as if it were 1."""
    shifted = logits.double()
    shifted = shifted - shifted.amax(dim=-1, keepdim=True)
    temperature = torch.where(batch.temperature == 0, 1.0, batch.temperature)
    probs = torch.softmax(shifted / temperature.unsqueeze(-1), dim=-1)
    if batch.any_min_p:
        probs = keep_min_p(probs, batch.min_p)
    if batch.max_top_k:
        probs = keep_top_k(probs, batch.top_k, batch.max_top_k)
    if batch.any_top_p:
        probs = keep_top_p(probs, batch.top_p)
    return probs


def keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Only what has at least min_p[b] times the probability of a row's likeliest token (Nguyen et
    al. 2024, arXiv:2407.01082), renormalized; 0 keeps a row as it is."""
    least = min_p.unsqueeze(-1) * probs.amax(dim=-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.where(min_p.unsqueeze(-1) == 0, probs, kept)


def keep_top_k(probs: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Only the top_k[b] largest of each row, renormalized; 0 keeps a row as it is. largest: of the
    top_k, at least, and 1 at least."""
    vocabulary = probs.shape[-1]
    counts = torch.where(top_k == 0, vocabulary, top_k.clamp(max=vocabulary))
    falling = probs.topk(min(largest, vocabulary), dim=-1).values
    return _keep_largest(probs, counts, falling)


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Only the fewest largest of each row whose sum reaches top_p[b], renormalized; 1 keeps all."""
    vocabulary, target = probs.shape[-1], top_p.unsqueeze(-1)
    falling = _falling(probs, target)
    counts = (falling.cumsum(dim=-1) < target).sum(dim=-1) + 1
    counts = torch.where(top_p == 1, vocabulary, counts.clamp(max=vocabulary))
    return _keep_largest(probs, counts, falling)


def _falling(probs: Tensor, target: Tensor) -> Tensor:
    """The largest of each row, as many as sum up to target [B, 1] in every row where it is under 1;
    on a device all, where asking how many these are would take longer than to sort them."""
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True).values
    width = _FIRST_WIDTH
    while True:  # few tokens carry the mass, as a rule: look at the whole row only if need be
        width = min(width, probs.shape[-1])
        falling = probs.topk(width, dim=-1).values
        enough = falling.cumsum(dim=-1)[:, -1:] >= target
        if width == probs.shape[-1] or bool((enough | (target == 1)).all()):
            return falling
        width *= 8


def accept_or_draw(target: Tensor, draft: Tensor, proposed: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [B], distributed as target [B, vocabulary], from `proposed` tokens drawn from draft.

    That token with probability min(1, target / draft), else one drawn from what the target has
    above the draft (Leviathan et al. 2023, arXiv:2211.17192, appendix A.1). target, draft, uniforms
    [B, 2]: float64.
    """
    at = proposed.unsqueeze(-1)
    p, q = (probs.gather(-1, at).squeeze(-1) for probs in (target, draft))
    above = (target - draft).clamp_(min=0)
    above = torch.where(above.sum(dim=-1, keepdim=True) == 0, target, above)  # equal, but rounding
    return torch.where(uniforms[:, 1] * q < p, proposed, draw(above, uniforms[:, 0]))


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [B]: the first token at which the running sum of a row exceeds its uniform's share."""
    sums = probs.cumsum(dim=-1)
    share = uniforms.to(sums.device).unsqueeze(-1) * sums[:, -1:]
    return (sums <= share).sum(dim=-1)


def _keep_largest(probs: Tensor, counts: Tensor, falling: Tensor) -> Tensor:
    """Exactly counts[b] largest of each row, among equals those with the lowest ids; sums to 1.

    A row whose count is the whole vocabulary is left untouched. falling: [B, n], the largest of
    each row, as many as the others' counts at least.
    """
    cut = counts < probs.shape[-1]
    at = counts.clamp(max=falling.shape[-1]).unsqueeze(-1) - 1
    threshold = falling.gather(-1, at)
    above, equal = probs > threshold, probs == threshold
    room = counts.unsqueeze(-1) - above.sum(dim=-1, keepdim=True)
    kept = torch.where(above | (equal & (equal.cumsum(dim=-1) <= room)), probs, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.where(cut.unsqueeze(-1), kept, probs)
