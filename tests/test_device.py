"""`--dtype auto` on a CPU: the time of a matrix product decides, timed until it is sure."""

from __future__ import annotations

import pytest
import torch
from lowbit.calib import device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bfloat16_seconds", "chosen", "timings"),
    [
        (10.0, torch.float32, 4),  # no instructions for it: each more timing would be a wait
        (0.2, torch.bfloat16, 4),
        (0.6, torch.bfloat16, 2 * device.REPEATS),
        (0.9, torch.float32, 2 * device.REPEATS),
    ],
)
def test_the_faster_dtype_is_taken_and_a_close_race_is_timed_longer(
    monkeypatch, bfloat16_seconds: float, chosen: torch.dtype, timings: int
) -> None:
    timed: list[torch.dtype] = []

    def seconds(a: torch.Tensor, b: torch.Tensor) -> float:
        timed.append(a.dtype)
        return bfloat16_seconds if a.dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(device, "_timed", seconds)
    assert device.resolve_dtype("auto", CPU, torch.bfloat16) == chosen
    assert len(timed) == timings


def test_a_named_dtype_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(device, "_timed", lambda a, b: pytest.fail("timed"))
    assert device.resolve_dtype("float16", CPU, torch.float32) == torch.float16
