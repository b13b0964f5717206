"""Answers by the texts that they were given to, found again for texts that are near.

An answer is of a context, all that it depends on beside the text: only within one are texts
compared. It belongs to the event loop that uses it and takes no locks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..request import FinishReason
from .near_texts import asks_another

_OVERHEAD = 1024  # bytes of an entry beside its texts and its vector
MAX_TRIED = 8  # near texts whose words are looked at: many prompts may be of one form
_NOBODY = 0  # the group of slots without an entry


@dataclass(frozen=True)
class Answer:
    """tokens: that it was made of."""

    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    tokens: int


class Hit(NamedTuple):
    """similarity: 1 for the same text. age: seconds since the answer was made."""

    answer: Answer
    similarity: float
    age: float


@dataclass
class _Entry:
    context: bytes
    text: str
    answer: Answer
    born: float
    nbytes: int
    slot: int | None


def near_rows(
    vectors: Tensor, groups: Tensor, group: int, query: Tensor, threshold: float, most: int
) -> list[tuple[int, float]]:
    """The `most` nearest rows of `vectors`, float32 [n, d] of length one, in `group` of `groups`,
    int64 [n], whose cosine with `query`, float32 [d] of length one, is at least `threshold`, with
    that: the nearest first."""
    cosines = vectors @ query
    rows = ((groups == group) & (cosines >= threshold)).nonzero().flatten()
    nearest = rows[cosines[rows].argsort(descending=True, stable=True)[:most]]
    return list(zip(nearest.tolist(), cosines[nearest].tolist(), strict=True))


class SemanticCache:
    """threshold: the least cosine. max_entries, max_bytes: past either what was not used for
    longest goes. ttl: seconds after which an answer is none any more. clock: seconds."""

    def __init__(
        self,
        threshold: float,
        max_entries: int,
        max_bytes: int,
        ttl: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold, self._max_entries, self._max_bytes = threshold, max_entries, max_bytes
        self._ttl, self._clock = ttl, clock
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()  # by last use
        self._slots: list[_Entry | None] = []
        self._free: list[int] = []
        self._vectors = torch.empty(0, 0)
        self._groups = torch.empty(0, dtype=torch.int64)
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def same(self, context: bytes, text: str) -> Hit | None:
        """The answer to this very text."""
        entry = self._entries.get((context, text))
        return None if entry is None else self._use(entry, 1.0)

    def near(self, context: bytes, text: str, vector: Tensor) -> Hit | None:
        """The answer to the nearest text that may ask the same. vector: of `text`, float32 [d] of
        length one."""
        if not len(self._slots):
            return None
        rows = near_rows(
            self._vectors[: len(self._slots)], self._groups[: len(self._slots)],
            _group(context), vector, self._threshold, MAX_TRIED,
        )  # fmt: skip
        for row, similarity in rows:
            entry = self._slots[row]
            if entry is None or entry.context != context or asks_another(entry.text, text):
                continue
            if hit := self._use(entry, similarity):
                return hit
        return None

    def add(self, context: bytes, text: str, vector: Tensor | None, answer: Answer) -> None:
        """In place of what the text had. vector: None for one that is found as itself alone."""
        if (old := self._entries.get((context, text))) is not None:
            self._remove(old)
        texts = len(text.encode()) + len(answer.text.encode())
        size = _OVERHEAD + texts + (0 if vector is None else 4 * len(vector))
        if size > self._max_bytes:
            return
        self._forget_old(size)
        slot = None if vector is None else self._place(vector, _group(context))
        entry = _Entry(context, text, answer, self._clock(), size, slot)
        if slot is not None:
            self._slots[slot] = entry
        self._entries[context, text] = entry
        self.nbytes += size

    def _use(self, entry: _Entry, similarity: float) -> Hit | None:
        age = self._clock() - entry.born
        if age > self._ttl:
            self._remove(entry)
            return None
        self._entries.move_to_end((entry.context, entry.text))
        return Hit(entry.answer, similarity, age)

    def _forget_old(self, size: int) -> None:
        """Make room for an entry of `size` bytes."""
        while self._entries and (
            len(self._entries) >= self._max_entries or self.nbytes + size > self._max_bytes
        ):
            self._remove(next(iter(self._entries.values())))

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.context, entry.text]
        self.nbytes -= entry.nbytes
        if entry.slot is not None:
            self._slots[entry.slot] = None
            self._groups[entry.slot] = _NOBODY
            self._free.append(entry.slot)

    def _place(self, vector: Tensor, group: int) -> int:
        """The slot that it is in from now on. The matrix doubles when it is full."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._slots)
            self._slots.append(None)
        if slot >= len(self._vectors):
            rows = min(max(16, 2 * len(self._vectors)), self._max_entries)
            vectors, groups = torch.zeros(rows, len(vector)), torch.zeros(rows, dtype=torch.int64)
            if slot:
                vectors[:slot], groups[:slot] = self._vectors, self._groups
            self._vectors, self._groups = vectors, groups
        self._vectors[slot], self._groups[slot] = vector, group
        return slot


def _group(context: bytes) -> int:
    """Two contexts may share one: entries name their own."""
    return int.from_bytes(context[:8], "big", signed=True) or 1
