"""One way to choose an implementation of an op: ordered candidates, each accepts or says why not.

The first candidate that accepts is taken. A caller may force one by name; forcing one that cannot
run is the caller's mistake and is reported with the reason, never quietly replaced by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from .errors import UserError


class Candidate(Protocol):
    """An implementation of an op: `decline` returns None, or the reason why it cannot run."""

    @property
    def name(self) -> str: ...

    def decline(self, problem: Any, /) -> str | None: ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True)
class Choice(Generic[C]):
    """The candidate taken, and the reasons of those before it in the table that declined."""

    candidate: C
    declined: dict[str, str]


def choose(op: str, candidates: Sequence[C], problem: Any, force: str | None = None) -> Choice[C]:
    """The first of `candidates` that accepts `problem`, or the one named `force`.

    Raises UserError when `force` is unknown or declines, and when nobody accepts.
    """
    if force is not None:
        return Choice(_forced(op, candidates, problem, force), {})
    declined: dict[str, str] = {}
    for candidate in candidates:
        reason = candidate.decline(problem)
        if reason is None:
            return Choice(candidate, declined)
        declined[candidate.name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in declined.items())
    raise UserError(f"no {op} kernel can run {problem}: {reasons}")


def _forced(op: str, candidates: Sequence[C], problem: Any, force: str) -> C:
    by_name = {c.name: c for c in candidates}
    if force not in by_name:
        raise UserError(f"unknown {op} kernel '{force}' (known: {', '.join(by_name)})")
    reason = by_name[force].decline(problem)
    if reason is not None:
        raise UserError(f"{op} kernel '{force}' cannot run {problem}: {reason}")
    return by_name[force]
