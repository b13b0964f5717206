"""Whether proposals pay: tokens a second with and without them, measured by turns.

Verified tokens cost more the more sequences run, and how many are right depends on the text. So for
each size of a batch both ways are tried for a few steps; the faster one is kept, and the other
tried again later, the later the more often it has lost.
"""

from __future__ import annotations

from typing import NamedTuple

TRIAL = 8  # steps that a way is tried for; the first of them is not counted
PATIENCE, LONGEST_PATIENCE = 128, 4096  # steps until the other way is tried again
MEMORY = 0.97  # of what was measured, kept from one step to the next


class Speeds(NamedTuple):
    """Tokens a second of one size of a batch, None before they are known."""

    sequences: int
    plain: float | None
    speculative: float | None

    @property
    def speedup(self) -> float | None:
        return self.speculative / self.plain if self.plain and self.speculative else None


class _Way:
    """How one way goes: a fading sum of seconds and tokens."""

    def __init__(self) -> None:
        self.seconds = self.tokens = 0.0

    def record(self, seconds: float, tokens: int) -> None:
        self.seconds = self.seconds * MEMORY + seconds
        self.tokens = self.tokens * MEMORY + tokens

    @property
    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


class _Size:
    """Of one size of a batch. on: whether proposals are made."""

    def __init__(self) -> None:
        self.ways = {True: _Way(), False: _Way()}
        self.on, self.is_trial = True, True
        self._left, self._patience = TRIAL, PATIENCE

    def record(self, seconds: float, tokens: int) -> None:
        """Of a step that went the way `on`."""
        if self._left != TRIAL or not self.is_trial:
            self.ways[self.on].record(seconds, tokens)
        self._left -= 1
        if self._left == 0:
            self._decide()

    def _decide(self) -> None:
        own, other = self.ways[self.on].rate, self.ways[not self.on].rate
        if other is None or not self.is_trial:  # the other way's turn
            self.on, self.is_trial, self._left = not self.on, True, TRIAL
            self.ways[self.on] = _Way()
            return
        assert own is not None
        won = own > other
        self._patience = PATIENCE if won else min(2 * self._patience, LONGEST_PATIENCE)
        self.on = self.on if won else not self.on
        self.is_trial, self._left = False, self._patience


class Governor:
    """`wants` before a step, `record` after it."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._last = 1

    def wants(self, sequences: int) -> bool:
        """Whether to propose tokens for so many sequences."""
        return self._of(sequences).on

    def record(self, sequences: int, seconds: float, tokens: int) -> None:
        """A step of `sequences` decodes alone took so long and gave so many tokens."""
        self._last = sequences
        self._of(sequences).record(seconds, tokens)

    def speeds(self) -> Speeds:
        """Of batches of the size that ran last."""
        size = self._of(self._last)
        return Speeds(self._last, size.ways[False].rate, size.ways[True].rate)

    @property
    def is_on(self) -> bool:
        return self._of(self._last).on

    @property
    def is_trying(self) -> bool:
        """The way taken is being measured, not chosen."""
        return self._of(self._last).is_trial

    def _of(self, sequences: int) -> _Size:
        """Batches share what is known of them up to the next power of two."""
        return self._sizes.setdefault((sequences - 1).bit_length(), _Size())
