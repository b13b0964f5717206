"""The GPU check without a GPU: its message, its verdicts on right and wrong cases, its table."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from lowbit.evals import gpu_check
from lowbit.evals.gpu_check import checked_faults, table
from lowbit.evals.gpu_speed import Ceilings, Speed
from lowbit.evals.gpu_timer import copies_needed
from lowbit.kernels.cases import all_cases
from lowbit.kernels.cases.case import Case

CEILINGS = Ceilings(4e12, 7e14)


def good_case() -> Case:
    return next(c for c in all_cases("small", "act_quant") if c.ci)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert "gpu_check needs a CUDA or ROCm GPU" in said.err and not said.out


def test_wrong_cases_are_found(kernel_device):
    case, device = good_case(), str(kernel_device)
    assert checked_faults(case, device, seed=3) == []

    def unwritten(o):
        (y,) = case.run(o)
        y[-1, -1] = float("nan")
        return (y,)

    def by_batch(o):
        (y,) = case.run(o)
        return (y + 1e-6 * len(y),)

    def broken(o):
        raise RuntimeError("out of registers\nmore")

    faults = {
        name: checked_faults(dataclasses.replace(case, run=run), device, 0)
        for name, run in {"nan": unwritten, "batch": by_batch, "raises": broken}.items()
    }
    assert "relative error nan" in faults["nan"][0]
    assert len(faults["batch"]) >= 2 and "alone differ from the batch" in faults["batch"][0]
    assert faults["raises"] == ["RuntimeError: out of registers"]


def test_bars_of_speed():
    fast = Speed("W4A16 8B", 1, "wna16", 1e-5, 4e-5, 36_000_000, 10**9, 3.0, 0.8)
    assert fast.ratio == pytest.approx(4) and fast.faults(CEILINGS) == []
    slow = fast._replace(ours=2e-5)
    assert slow.faults(CEILINGS) == [
        "2.00x, under 3.0x", "45% of copy bandwidth, under 80%"
    ]  # fmt: skip


def test_the_table_shows_every_row():
    row = gpu_check._speed_row(
        Speed("W4A16 8B", 16, "wna16", 1e-5, 4e-5, 36_000_000, 10**9), CEILINGS
    )
    report = {
        "device": "NVIDIA H200", "torch": "2.13.0", "seed": 0, "seconds": 3.0,
        "ceilings": CEILINGS._asdict(), "speeds": [row],
        "cases": [{"case": "a right one", "faults": []}, {"case": "b", "faults": ["wrong"]}],
    }  # fmt: skip
    text = table(report)
    assert "NVIDIA H200" in text and "copy 4.00 TB/s" in text
    assert "right" in text and "wrong" in text and "4.00x" in text and "met" in text


def test_operands_together_exceed_the_cache():
    assert copies_needed(8 << 20) == 32 and copies_needed(1 << 40) == 2 and copies_needed(1) == 64


def test_each_kind_of_speed_gets_its_share_of_the_time(monkeypatch, capsys):
    """A kind that would take for ever leaves the next one its half."""
    now = 0.0

    def speeds(what: str):
        nonlocal now
        while True:
            now += 1.0
            yield Speed(what, 1, "wna16", 1e-5, 4e-5, 1, 1, 0.0, 0.0)

    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now)
    monkeypatch.setattr(
        gpu_check.importlib, "import_module",
        lambda name, package: SimpleNamespace(speeds=lambda ceilings: speeds(name)),
    )  # fmt: skip
    found = [speed.what for speed in gpu_check._measure(CEILINGS, 20.0)]
    assert [found.count(f".{name}") for name in gpu_check.SPEEDS] == [11, 10]
    assert capsys.readouterr().err.count("out of time") == 2
