"""Guesses that the model improves itself: Jacobi iteration with a memory of its trajectories.

Each step runs a window of guessed tokens behind the last one. What the model says behind a wrong
guess is often right a place or two further on (Santilli et al. 2023, arXiv:2305.10427): it becomes
the guess for the next step, and the runs of tokens that arise so from step to step are kept by
their first token (Fu et al. 2024, arXiv:2402.02057, lookahead decoding). Runs that begin with the
last token come first in the next window.

Here window and verification are one chain of tokens under the plain causal mask, so that it needs
nothing of attention; the paper runs several windows and runs side by side under a mask of its own.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ..request import Continuation
from .proposer import Drafting, Proposal, Verified

RUN = 4  # tokens kept of a trajectory behind its first one
RUNS = 1 << 14  # kept for a continuation


class Lookahead:
    """most: tokens of the window, and of a proposal."""

    name = "lookahead"

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: WeakKeyDictionary[Continuation, _Windowed] = WeakKeyDictionary()

    def propose(self, asked: Sequence[Drafting]) -> list[Proposal]:
        proposals = []
        for continuation, tokens, most in asked:
            known = self._known.get(continuation)
            if known is None:
                known = self._known[continuation] = _Windowed(self.most)
            proposals.append(Proposal(known.guess(tokens)[:most]))
        return proposals

    def observe(self, verified: Sequence[Verified]) -> None:
        for continuation, tokens, logits, accepted in verified:
            if known := self._known.get(continuation):
                known.learn(tokens, logits.argmax(dim=-1).tolist(), accepted)


class _Windowed:
    """Of one continuation: the window, and the runs that its trajectories left.

    trails: for each place behind the last token a guess, as the run of tokens that led to it.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._trails: list[list[int]] = []
        self._runs: OrderedDict[int, list[int]] = OrderedDict()  # by the token before each
        self._seen = 0  # tokens of the text that are in `_runs`

    def guess(self, tokens: array[int]) -> list[int]:
        """As many tokens as the window has."""
        for begin in range(max(0, self._seen - RUN), len(tokens) - 1):
            self._keep(tokens[begin], tokens[begin + 1 : begin + 1 + RUN].tolist())
        self._seen = len(tokens)
        guesses: list[int] = []
        while len(guesses) < self._width:
            run = self._runs.get(guesses[-1] if guesses else tokens[-1])
            if run is None:
                break
            guesses += run
        del guesses[self._width :]
        while len(self._trails) < self._width:  # at first: the newest tokens once more
            self._trails.append([tokens[-1 - len(self._trails) % len(tokens)]])
        for place in range(len(guesses)):
            self._trails[place] = [guesses[place]]
        return [trail[-1] for trail in self._trails]

    def learn(self, tokens: list[int], said: list[int], accepted: int) -> None:
        """said: the likeliest token after each of `tokens`, the last of the text and guesses."""
        trails: list[list[int]] = []
        for place in range(accepted + 1, len(tokens)):  # the first wrong guess, and those behind it
            trail = [*self._trails[place - 1][-RUN:], said[place]]
            for first in range(len(trail) - 1):
                self._keep(trail[first], trail[first + 1 :])
            trails.append(trail)
        self._trails = trails

    def _keep(self, token: int, run: list[int]) -> None:
        self._runs[token] = run
        self._runs.move_to_end(token)
        if len(self._runs) > RUNS:
            self._runs.popitem(last=False)
