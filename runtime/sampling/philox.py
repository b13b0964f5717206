"""Random numbers that depend on their key and counter alone: Philox4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), for all rows of a step at once.

The key is a request's seed, the counter says which of its draws it is. So a request's tokens do not
depend on what else is in the batch, and one that is preempted and computed again draws the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_UNIT = 2.0**-53


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """int64 [n, 4], words of 32 bits, from counter int64 [n, 4] and key int64 [n, 2], likewise."""
    multipliers = torch.tensor(_MULTIPLIERS, device=counter.device)
    weyl = torch.tensor(_WEYL, device=counter.device)
    even, odd = counter[:, 0::2], counter[:, 1::2]
    for _ in range(_ROUNDS):
        product = even * multipliers  # modulo 2^64, whose bits do not depend on the sign
        high, low = (product >> 32) & _MASK, product & _MASK
        even, odd = high.flip(1) ^ odd ^ key, low.flip(1)
        key = (key + weyl) & _MASK
    return torch.stack([even[:, 0], odd[:, 0], even[:, 1], odd[:, 1]], dim=1)


def uniforms(seeds: Tensor, steps: Tensor, streams: Tensor, purpose: int = 0) -> Tensor:
    """float64 [n, 2] in [0, 1), two of 53 bits for each row. seeds: int64 [n], see `as_int64`;
    steps, streams: int64 [n] from 0 on, the draw's number and the continuation's. purpose: tells
    numbers apart that are drawn at one place for different things."""
    what = torch.full_like(steps, purpose)
    counter = torch.stack([steps & _MASK, streams & _MASK, steps >> 32, what], dim=1)
    key = torch.stack([seeds & _MASK, (seeds >> 32) & _MASK], dim=1)
    words = philox4x32(counter, key)
    bits = (words[:, 0::2] >> 5 << 26) | (words[:, 1::2] >> 6)
    return bits.double() * _UNIT


def as_int64(seeds: Iterable[int]) -> Tensor:
    """int64 [n] of the same bits as the seeds, which are from 0 to 2^64 - 1."""
    return torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds], dtype=torch.int64)
