"""What a source of guesses is to the engine, and the nouns between the two."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..request import Continuation


class Drafting(NamedTuple):
    """A continuation that takes proposals: tokens, of its prompt and all since, the last of which
    has yet to run; most: how many it can take, 1 or more."""

    continuation: Continuation
    tokens: array[int]
    most: int


class Proposal(NamedTuple):
    """tokens: those that may come next, in order; none where there is no guess. probs: float64
    [tokens, vocabulary], what each was drawn from; None: they were not drawn, but chosen."""

    tokens: list[int]
    probs: Tensor | None = None


class Verified(NamedTuple):
    """What came of a step. tokens: the continuation's last one before it, then its proposals.
    logits: [tokens, vocabulary] after each, as the model gave them. accepted: how many of the
    proposals came."""

    continuation: Continuation
    tokens: list[int]
    logits: Tensor
    accepted: int


class Proposer(Protocol):
    """A source of guesses. name: as the user knows it. most: tokens a proposal.

    Guesses must not depend on random numbers that the sampler will use: then what is drawn has the
    model's own distribution.
    """

    name: str
    most: int

    def propose(self, asked: Sequence[Drafting]) -> list[Proposal]:
        """One for each of `asked`."""
        ...

    def observe(self, verified: Sequence[Verified]) -> None:
        """What the last step said, of each continuation that was in it."""
        ...
