"""Tuning keeps the fastest tiles that are right, and linears run with what was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from lowbit.evals import tune as tuning
from lowbit.evals.tune import TUNABLES, candidates_to_time, checkpoint_problems
from lowbit.kernels import linear_a8, linear_wna16, tuned
from lowbit.kernels.a8_forms import a8_candidates, a8_config
from lowbit.kernels.activations import ActivationFormat
from lowbit.kernels.elements import int_elements
from lowbit.kernels.errors import UserError
from lowbit.kernels.linear_ops import LinearProblem
from lowbit.kernels.triton_ops.tiles import GemmConfig
from lowbit.kernels.tuned import (
    Tuned,
    read_tuned,
    tuned_choice,
    tuned_file,
    weight_key,
    write_tuned,
)
from lowbit.kernels.wna16_forms import wna16_candidates, wna16_config
from lowbit.quantize.checkpoint.load import Checkpoint
from torch import Tensor

from .command import Commands

P = LinearProblem(3, 32, True, 256, 72, torch.float16, "cuda")
W8A8 = P._replace(num_bits=8, group_size=256, activation=ActivationFormat(int_elements(8)))
GPU = torch.device("cuda", 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a GPU that is not here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "device_name", lambda device: "Some GPU (80 GB)")
    tuned._choices_on.cache_clear()
    return tuned_file("Some GPU (80 GB)")


@pytest.mark.parametrize("wrong", [False, True])
def test_the_fastest_right_candidate_is_kept(
    wrong: bool, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock says that one candidate takes half the time; where its results are wrong, or it
    fails, the shipped one stays."""
    tunable = TUNABLES["wna16"]._replace(buckets=(16, 130))
    fast = {
        rows: tunable.candidates(P, rows, kernel_device)[1 if rows > 128 else 3]
        for rows in tunable.buckets
    }
    failing = tunable.candidates(P, 16, kernel_device)[5]
    running = None

    def run(x: Tensor, *rest: object) -> Tensor:
        nonlocal running
        running = rest[-1]
        if running == failing:
            raise RuntimeError("out of shared memory")
        y = linear_wna16.run_wna16(x, *rest)  # pyright: ignore[reportArgumentType]
        return y + 1 if wrong and running == fast[len(x)] else y

    def clock(calls: Sequence[Callable[[], object]]) -> float:
        calls[-1]()
        return 0.5 if running in fast.values() else 1.0

    few = tunable._replace(
        run=run,
        candidates=lambda p, rows, on: tunable.candidates(p, rows, on)[: 2 if rows > 128 else 6],
    )
    monkeypatch.setitem(tuning.TUNABLES, "wna16", few)
    told: list[int] = []
    trials = list(tuning.tune([P], kernel_device, clock, lambda nbytes: 2, lambda: told.append(1)))
    assert len(told) == candidates_to_time([P], kernel_device) == 8
    for trial, rows in zip(trials, tunable.buckets, strict=True):
        shipped = tunable.candidates(P, rows, kernel_device)[0]
        assert trial.tuned.config == (shipped if wrong else fast[rows])
        assert trial.tuned[2:] == (trial.tuned.config, 1.0 if wrong else 0.5, 1.0)
        assert (str(fast[rows]) in trial.passed_over) == wrong
    assert "out of shared memory" in trials[0].passed_over[str(failing)]


def test_linears_run_with_what_was_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to each choice's tokens; beyond them, and for other weights, with what is shipped."""
    tile = GemmConfig(16, 128, 2, 8, 3)
    for kernel, problem, module in (("wna16", P, linear_wna16), ("a8", W8A8, linear_a8)):
        key = weight_key(kernel, problem)
        write_tuned(cache, "Some GPU", [Tuned(key, 16, tile, 1e-6, 2e-6)])
        used: list[GemmConfig | None] = []
        monkeypatch.setattr(
            tuned, "tuned_choice",
            lambda name, p, rows, on: tuned_choice(name, p, rows, GPU),
        )  # fmt: skip
        monkeypatch.setattr(
            module, f"run_{kernel}", lambda x, t, b, p, config, used=used: used.append(config)
        )
        monkeypatch.setattr(module, "tile_question", lambda p, on: (p.out_features, 2, 8, 90))
        run = TUNABLES[kernel].kernel.run
        for rows, asked in ((16, problem), (17, problem), (3, problem._replace(out_features=80))):
            run(torch.zeros(rows, 256, dtype=torch.float16), (), None, asked)
        run(torch.zeros(2, 256), (), None, problem._replace(batch_invariant=True))
        assert used[0] == tile
        assert tile not in used[1:] and len(used) == 4


def test_a_file_holds_the_newest_choice_of_each(cache: Path) -> None:
    tile = GemmConfig(16, 64, 2, 4, 3)
    first = [Tuned("a", 16, tile, 1.0, 2.0), Tuned("b", 256, None, 1.0, 1.5)]
    write_tuned(cache, "Some GPU", first)
    newer = Tuned("a", 16, tile._replace(block_n=128), 0.5, 2.0)
    write_tuned(cache, "Some GPU", [newer])
    assert read_tuned(cache) == [newer, first[1]]
    assert read_tuned(cache.with_name("none.json")) == []


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version": 0}', '{"version": 1, "choices": [{}]}',
     '{"version": 1, "choices": [{"key": "a", "rows": 16, "seconds": 1, "shipped_seconds": 1, '
     '"config": {"block_m": 17, "block_n": 64, "split_k": 1, "num_warps": 4, "num_stages": 2}}]}'],
)  # fmt: skip
def test_a_damaged_file_is_refused(cache: Path, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with pytest.raises(UserError, match=r"Some-GPU.*remove it, or tune again"):
        tuned_choice("wna16", P, 4, GPU)


@pytest.mark.parametrize("arch", [0, 80, 89, 90, 100, "gfx942"])
def test_the_shipped_choice_is_tried_first_and_each_once(arch: int | str) -> None:
    for rows in (16, 32, 64, 128):
        found = wna16_candidates(rows, 4096, 32, 4, arch)
        assert found[0] == wna16_config(rows, 4096, 32, 4, arch)
        assert len(set(found)) == len(found)
    assert wna16_candidates(512, 4096, 32, 4, arch)[0] is None
    found = a8_candidates(1024, 4096, 32, True, arch)
    assert found[0] == a8_config(1024, 4096, 32, True, arch)
    assert len(set(found)) == len(found)


def test_a_checkpoint_s_problems_are_those_of_its_products(packed: Path) -> None:
    """q, k and v, and gate and up, as they run: together."""
    opened = Checkpoint(packed)
    problems = checkpoint_problems(opened, torch.bfloat16, GPU)
    heights = {
        leaf: opened.shape(f"model.layers.0.{leaf}")[0]
        for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    }
    qkv = sum(rows for leaf, rows in heights.items() if leaf.startswith("self_attn"))
    assert qkv in {p.out_features for p in problems}
    assert 2 * heights["mlp.gate_proj"] in {p.out_features for p in problems}
    assert len(problems) == len(set(problems)) <= 4


def test_without_a_gpu_the_command_says_so(command: Commands, tmp_path: Path) -> None:
    command("tune", tmp_path).refuses("torch sees none here", "the shipped tiles run")
