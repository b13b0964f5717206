"""Bytes that a kernel moves, counted in Triton's interpreter, operand by operand.

Every load and store of the interpreter is seen, with the addresses that its mask lets through; an
address that one instruction reads twice counts once, as a warp reads it once. Addresses tell the
operand. Run in a process of its own with TRITON_INTERPRET=1 (`python -m
lowbit.kernels.audit.traffic FAMILY [--ci]`): the interpreter leaves Triton's language patched.
Writes one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..cases import all_cases
from ..cases.case import Case, Maker


class Moved(NamedTuple):
    """Bytes moved of one operand, and those that must be."""

    loaded: int
    stored: int
    floor: int

    @property
    def ratio(self) -> float:
        return (self.loaded + self.stored) / self.floor if self.floor else 0.0


class _Access(NamedTuple):
    first: int  # address
    nbytes: int
    store: bool


def count(case: Case) -> dict[str, Moved]:
    """Bytes by operand of a small case; "out": its results; "other": everything else."""
    operands = case.make(Maker("cpu"))
    with _watched() as accesses:
        results = case.run(operands)
    results = results if isinstance(results, tuple) else (results,)
    ranges = {
        name: (t.data_ptr(), t.data_ptr() + t.nbytes)
        for name, t in (*operands.items(), *((f"out{i}", r) for i, r in enumerate(results)))
        if t is not None
    }
    loaded, stored = dict.fromkeys((*ranges, "other"), 0), dict.fromkeys((*ranges, "other"), 0)
    for access in accesses:
        owner = next((n for n, (a, b) in ranges.items() if a <= access.first < b), "other")
        (stored if access.store else loaded)[owner] += access.nbytes
    floors = {name: end - start for name, (start, end) in ranges.items()}
    floors |= case.floor(operands) if case.floor else {}
    return {n: Moved(loaded[n], stored[n], floors.get(n, 0)) for n in loaded}


@contextmanager
def _watched() -> Iterator[list[_Access]]:
    """Accesses of launches inside, appended as they happen."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    accesses: list[_Access] = []

    def record(pointers: Any, mask: Any, store: bool) -> None:
        active = np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if len(active):
            accesses.append(_Access(int(active[0]), size * len(active), store))

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        record(pointers, mask, False)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        record(pointers, mask, True)
        return store(self, pointers, value, mask, *rest)

    builder: Any = InterpreterBuilder
    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    try:
        yield accesses
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def main(family: str, only_ci: bool) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    counted = {
        case.name: count(case) for case in all_cases("small", family) if case.ci or not only_ci
    }
    json.dump(
        {name: {k: list(m) for k, m in of.items()} for name, of in counted.items()}, sys.stdout
    )


if __name__ == "__main__":
    main(sys.argv[1], "--ci" in sys.argv[2:])
