"""Guesses copied from where the newest tokens stood before, in the prompt or in the output.

Prompt lookup (Saxena 2023; Yang et al. 2023, arXiv:2304.04487): texts that are summed up, corrected
or answered come back in parts. It needs no model and finds nothing in text without repetition.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ..request import Continuation
from .proposer import Drafting, Proposal, Verified

LONGEST, SHORTEST = 4, 2  # tokens that must be the same


class PromptLookup:
    """Looks where the last `longest` tokens of a text stood before, else fewer, down to `shortest`,
    and proposes what came behind them. most: tokens a proposal."""

    name = "ngram"

    def __init__(self, most: int, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.most, self._sizes = most, range(longest, shortest - 1, -1)
        self._known: WeakKeyDictionary[Continuation, _Index] = WeakKeyDictionary()

    def propose(self, asked: Sequence[Drafting]) -> list[Proposal]:
        proposals = []
        for continuation, tokens, most in asked:
            index = self._known.get(continuation)
            if index is None:
                index = self._known[continuation] = _Index(self._sizes)
            place = index.find(tokens)
            proposals.append(Proposal([] if place is None else _copied(tokens, place, most)))
        return proposals

    def observe(self, verified: Sequence[Verified]) -> None:
        pass


class _Index:
    """Where each run of tokens stands last in a text that grows, but for its end."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._behind: dict[bytes, int] = {}  # from a run's tokens to the place behind it
        self._done = 0

    def find(self, tokens: array[int]) -> int | None:
        """The place of the token behind the last run that is the end of `tokens`, too."""
        for end in range(self._done + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._behind[tokens[end - size : end].tobytes()] = end
        self._done = max(self._done, len(tokens) - 1)
        for size in self._sizes:
            if size < len(tokens):
                place = self._behind.get(tokens[-size:].tobytes())
                if place is not None:
                    return place
        return None


def _copied(tokens: array[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; behind the end it goes on with what was copied."""
    period = len(tokens) - place
    return [tokens[place + i % period] for i in range(count)]
