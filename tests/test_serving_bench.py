"""The serving bench runs engines by turns, counts what it says, and names what cannot run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from lowbit.evals import serving_bench as bench
from lowbit.kernels.errors import UserError

from .runtime_models import FAMILIES, save_tiny


class Clock:
    """An engine of known speed, which notes what it is asked."""

    def __init__(self, seconds_a_token: float, cannot: int = 99) -> None:
        self.seconds_a_token, self.cannot = seconds_a_token, cannot
        self.asked: list[tuple[list[list[int]], int]] = []

    def seconds(self, prompts: list[list[int]], new: int) -> float | None:
        self.asked.append((prompts, new))
        return None if len(prompts) >= self.cannot else self.seconds_a_token * new + 1


def test_rates_are_those_of_the_loads() -> None:
    engine: Any = Clock(0.5)
    draw = random.Random(0)
    assert bench.rate(engine, bench.LOADS["batch"], draw) == 16 * 128 / (128 * 0.5 + 1)
    assert bench.rate(engine, bench.LOADS["prefill"], draw) == 512 / 1.5
    assert bench.rate(engine, bench.LOADS["single"], draw) == pytest.approx(1 / 0.5)
    shapes = [(len(p), len(p[0]), new) for p, new in engine.asked]
    assert shapes == [(16, 128, 128), (1, 512, 1), (1, 16, 128), (1, 16, 1)]


def test_engines_run_by_turns_on_the_same_prompts_and_a_first_run_is_not_counted() -> None:
    engines: Any = [Clock(0.5), Clock(0.25, cannot=16)]
    rates = bench.measure(engines, ["batch", "prefill"], repeats=2)
    assert {key: len(found) for key, found in rates.items()} == {
        (0, "batch"): 2, (0, "prefill"): 2, (1, "prefill"): 2
    }  # fmt: skip
    assert engines[0].asked == engines[1].asked
    prompts = [str(p) for p, _ in engines[0].asked]
    assert len(set(prompts)) == 6, "no cache has seen them"
    shown = bench.table(["ours", "other"], ["batch", "prefill"], rates)
    assert "| other | - | 410 (410-410), 1.20x |" in shown


def test_a_real_engine_answers_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    asked = bench.Asked.parse(f"lowbit={save_tiny(tmp_path / 'tiny', FAMILIES['llama']())}")
    engine = bench.Running(asked, threads=1)
    try:
        assert engine.name.startswith("lowbit, float32, plain")
        few, many = engine.seconds([[1, 2, 3]], 1), engine.seconds([[1, 2, 3]], 64)
        assert few is not None and many is not None and 0 < few < many
    finally:
        engine.close()
    with pytest.raises(UserError, match="lowbit on nowhere ended with exit code 1"):
        bench.Running(bench.Asked.parse("lowbit=nowhere"), threads=1)


def test_what_is_asked_for_is_read(tmp_path: Path) -> None:
    asked = bench.Asked.parse("vllm=/a/model,compiled@/env/bin/python")
    assert asked == ("vllm", "/a/model", "compiled", "/env/bin/python")
    for wrong in ("vllm", "fast=/a", ""):
        with pytest.raises(UserError, match="must be ENGINE=MODEL"):
            bench.Asked.parse(wrong)
