"""What changes logits before a draw: pure functions of tensors, for the rows that ask for it.

All take logits float32 [rows, vocabulary] and write into them. Tokens are named by their place in
the flattened logits, row * vocabulary + id, so that rows with few and with many need no padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..transfers import moved


def add_bias_(logits: Tensor, at: Tensor, bias: Tensor) -> Tensor:
    """Add bias float32 [m] at the places int64 [m], of which no two are the same."""
    flat = logits.view(-1)
    flat[at] += bias
    return logits


def ban_(logits: Tensor, at: Tensor) -> Tensor:
    """Never draw what lies at the places int64 [m]."""
    logits.view(-1)[at] = -torch.inf
    return logits


def penalize_(
    logits: Tensor, prompt: Tensor, output: Tensor, presence: Tensor, frequency: Tensor,
    repetition: Tensor,
) -> Tensor:  # fmt: skip
    """Repetition penalty (Keskar et al. 2019) for prompt and output, then OpenAI's frequency and
    presence penalties for the output.

    prompt, output: int64, the places of all their tokens, as often as they stand there; of the
    host, as the device cannot tell how many differ without being waited for. presence, frequency,
    repetition: float32 [rows]; 0, 0 and 1 change nothing.
    """
    vocabulary, flat = logits.shape[1], logits.view(-1)
    seen, drawn, counts = (moved(part, logits.device) for part in _distinct(prompt, output))
    by = repetition[seen // vocabulary]
    values = flat[seen]
    flat[seen] = torch.where(values > 0, values / by, values * by)
    rows = drawn // vocabulary
    flat[drawn] -= frequency[rows] * counts + presence[rows]
    return logits


def _distinct(prompt: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places of both, each once; places of the output, and how often each stands there."""
    drawn, counts = output.unique(return_counts=True)
    return torch.cat([prompt, output]).unique(), drawn, counts


def allow_(logits: Tensor, rows: Tensor, bitmask: Tensor) -> Tensor:
    """In `rows` (int64 [m]) keep only the tokens whose bit is set in bitmask int32 [m, words], the
    lowest bit of the first word being token 0's. Tokens behind the last word are not allowed."""
    bits = torch.arange(32, device=bitmask.device, dtype=torch.int32)
    allowed = ((bitmask.unsqueeze(-1) >> bits) & 1).flatten(1).bool()
    kept = torch.zeros(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    width = min(allowed.shape[1], logits.shape[1])
    kept[:, :width] = allowed[:, :width]
    logits[rows] = logits[rows].masked_fill(~kept, -torch.inf)
    return logits
