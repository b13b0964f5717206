"""What a measured speed is, and its bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Ceilings(NamedTuple):
    """Measured on this device: bytes a second copied, bfloat16 operations a second of torch."""

    bandwidth: float
    matmul: float


class Speed(NamedTuple):
    """One row. what: scheme and shape. size: tokens, or context. ours, theirs: seconds.
    moved: bytes that must move. bar: how many times as fast as `theirs` it must be (0: no bar).
    bandwidth_bar: share of the copy bandwidth that it must reach (0: no bar)."""

    what: str
    size: int
    kernel: str
    ours: float
    theirs: float
    moved: int
    operations: int
    bar: float = 0.0
    bandwidth_bar: float = 0.0

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    def bandwidth_share(self, ceilings: Ceilings) -> float:
        """Bytes that must move a second, over the copy's."""
        return self.moved / self.ours / ceilings.bandwidth

    def faults(self, ceilings: Ceilings | None) -> list[str]:
        """Bars that it misses; ceilings: None where they could not be measured."""
        found = []
        if self.ratio < self.bar:
            found.append(f"{self.ratio:.2f}x, under {self.bar}x")
        if self.bandwidth_bar and ceilings is None:
            found.append("no copy bandwidth to compare with")
        elif ceilings is not None and self.bandwidth_share(ceilings) < self.bandwidth_bar:
            share = self.bandwidth_share(ceilings)
            found.append(f"{share:.0%} of copy bandwidth, under {self.bandwidth_bar:.0%}")
        return found


def each(items: Iterable[T], measure: Callable[[T], Speed]) -> Iterator[Speed]:
    """The speed of each of `items`. One that fails costs its own row; RuntimeError, naming all that
    did, comes last."""
    failed = []
    for item in items:
        try:
            yield measure(item)
        except Exception as e:  # a compiler's or a driver's; all are findings here
            failed.append(f"{item}: {first_line(e)}")
    if failed:
        raise RuntimeError("; ".join(failed))


def first_line(error: Exception) -> str:
    """Its kind, and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
