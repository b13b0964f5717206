"""The bench of what verify tells of damaged bytes: it damages what it says, and counts right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lowbit.evals.damage_bench import bench, damaged, holds, stretches
from lowbit.quantize import run
from lowbit.quantize.recipe import Recipe

from .models import hashes
from .runtime_models import FAMILIES, save_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FAMILIES["llama"]()
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    return save_tiny(tmp_path_factory.mktemp("damage") / "model", config)


@pytest.fixture(scope="module")
def checkpoint(base: Path) -> Path:
    recipe = Recipe.from_dict({"passes": [{"method": "rtn", "scheme": "W4A16"}]})
    run(base, base.parent / "w4", recipe)
    return base.parent / "w4"


def test_only_the_bytes_of_chosen_linears_change_and_change_back(checkpoint: Path) -> None:
    places = stretches(checkpoint)
    assert len(places) == 14 and len({p.module for p in places}) == 14
    before = (checkpoint / "model.safetensors").read_bytes()
    with damaged(places[:2], 50, random.Random(0)):
        now = (checkpoint / "model.safetensors").read_bytes()
        changed = [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
        inside = [sum(p.start <= i < p.start + p.nbytes for i in changed) for p in places]
        assert inside == [50, 50] + 12 * [0]
    assert (checkpoint / "model.safetensors").read_bytes() == before


def test_damage_is_named_and_the_checkpoint_is_left_as_it_was(base: Path, checkpoint: Path) -> None:
    before = hashes(checkpoint)
    result = bench(checkpoint, base, (300, 1), linears=3, seed=0)
    assert hashes(checkpoint) == before
    assert holds(result), result
    assert [(t["bytes"], t["damaged"], t["named"]) for t in result["trials"]] == [
        (300, 3, 3), (1, 3, 3)]  # fmt: skip


def test_a_false_alarm_and_a_miss_do_not_hold() -> None:
    trial = {"not_named": [], "whole_ones_named": []}
    right = {"whole": {"errors": []}, "trials": [trial, {**trial, "not_named": ["x"]}]}
    assert holds(right)
    assert not holds({**right, "whole": {"errors": ["x"]}})
    assert not holds({**right, "trials": [{**trial, "not_named": ["x"]}]})
    assert not holds({**right, "trials": [trial, {**trial, "whole_ones_named": ["x"]}]})
