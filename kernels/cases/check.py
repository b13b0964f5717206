"""A case against its reference, and rows of it alone against the batch, on any device."""

from __future__ import annotations

import torch

from .case import Case, Maker, Operands, Results


def check_case(case: Case, device: str, seed: int = 0) -> list[str]:
    """What is wrong with `case` on fresh random operands; nothing when all is right.

    Outputs should be poisoned, as `torch.use_deterministic_algorithms(True)` does to all that is
    allocated: what a kernel leaves unwritten is then no number, and found.
    """
    operands = case.make(Maker(device, seed))
    results = _tuple(case.run(operands))
    faults = []
    found = case.worth(results) if case.worth is not None else results
    for i, (result, want) in enumerate(zip(found, _tuple(case.reference(operands)), strict=True)):
        want = want.double()
        error = float((result.double() - want).norm() / want.norm())
        if not error <= case.tolerance:  # NaN is no number that is larger
            faults.append(f"result {i}: relative error {error:.2e}, over {case.tolerance:.2e}")
    return faults + _batch_faults(case, operands, results)


def _batch_faults(case: Case, operands: Operands, whole: tuple[torch.Tensor, ...]) -> list[str]:
    if not case.by_row:
        return []
    first = operands[case.by_row[0]]
    assert first is not None
    rows = len(first)
    faults = []
    for start, stop in {(0, 1), (rows // 2, rows // 2 + 1), (rows // 3, rows)}:
        some = {
            name: t[start:stop] if name in case.by_row and t is not None else t
            for name, t in operands.items()
        }
        for i, (alone, batch) in enumerate(zip(_tuple(case.run(some)), whole, strict=True)):
            if not torch.equal(alone, batch[start:stop]):
                faults.append(f"result {i}: rows {start} to {stop} alone differ from the batch")
    return faults


def _tuple(results: Results) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
