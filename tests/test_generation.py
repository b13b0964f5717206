"""Greedy continuations: repetition, loops and first differences by hand, and on real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from lowbit.evals.generation import (
    PROMPT_TOKENS,
    GenerationPlan,
    cut_prompts,
    ends_in_a_loop,
    first_difference,
    generation_of,
    measure_generation,
    repetition,
)
from lowbit.evals.report_generation import generations
from lowbit.evals.report_pieces import Table, Texts
from lowbit.evals.results import check_results
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.eval import evaluate
from typer.testing import CliRunner

from .models import change_tensors, copied


def test_repetition_by_hand() -> None:
    assert repetition([1, 2, 3, 4, 5, 6]) == 0.0 and repetition([1, 1]) == 0.0
    assert repetition([7] * 7) == 3 / 4, "four runs, all the same"
    assert repetition([1, 2, 3, 4, 9, 1, 2, 3, 4]) == pytest.approx(1 / 6)


def test_a_loop_is_said_three_times_at_the_end() -> None:
    assert ends_in_a_loop([5, 9, 1, 2, 1, 2, 1, 2]) and ends_in_a_loop([4, 4, 4])
    assert not ends_in_a_loop([1, 2, 1, 2, 1, 2, 3]) and not ends_in_a_loop([1, 2, 1, 2])
    phrase = list(range(32))
    assert ends_in_a_loop(phrase * 3) and not ends_in_a_loop(list(range(33)) * 3)


def test_the_first_token_that_differs() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2, "one has ended"


def test_a_model_beside_its_base() -> None:
    plan = GenerationPlan(((1,), (2,), (3,)), 4)
    base = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]
    found = generation_of(plan, [base[0], [5, 0, 0, 0], [5, 6, 7]], base, str)
    assert (found.same, found.first_difference, found.differences) == (1, 2.0, [None, 1, 3])
    assert found.loops == 1 and found.samples[1] == ("(2,)", "[5, 6, 7, 8]", "[5, 0, 0, 0]")
    own = generation_of(plan, base, None, str)
    assert own.same is None and own.differences is None and own.samples[0].base is None


def test_prompts_lie_apart() -> None:
    prompts = cut_prompts(range(1000), 4)
    assert [p[0] for p in prompts] == [0, 250, 500, 750] and len(prompts[3]) == PROMPT_TOKENS
    for count, tokens in ((0, 1000), (30, 1000)):
        with pytest.raises(UserError, match=f"too few for {count} prompts of 48"):
            cut_prompts(range(tokens), count)


def test_a_changed_model_leaves_its_base(shallow: Path, tmp_path: Path) -> None:
    other = copied(shallow, tmp_path / "other")
    change_tensors(other, lambda t: t["model.layers.0.mlp.up_proj.weight"].mul_(-1))
    plan = GenerationPlan(tuple(tuple(range(i, i + 9)) for i in range(3)), 8)
    models = {"base": shallow, "same": shallow, "other": other}
    found = measure_generation(models, plan, "base", "float32", "cpu", {})
    assert found["same"].same == 3 and found["same"].first_difference is None
    assert found["other"].same is not None and found["other"].same < 3
    rows = [{"label": name, "generation": {**g._asdict(), "samples": [
        s._asdict() for s in g.samples]}} for name, g in found.items()]  # fmt: skip
    _, table, first, second = generations(rows)
    assert isinstance(table, Table) and len(table.rows) == 3
    assert isinstance(first, Texts) and first.headings == ["prompt", "base", "same"]
    assert all(row[1] == row[2] for row in first.rows)
    assert isinstance(second, Texts) and any(row[1] != row[2] for row in second.rows)


def test_the_command_continues_passages(shallow: Path, story: Path) -> None:
    app = typer.Typer()
    app.command()(evaluate)
    options = ["--base", str(shallow), "--text", str(story), "--ctx", "64", "--windows", "1",
               "--generate", "2", "--json"]  # fmt: skip
    shown = CliRunner().invoke(app, [str(shallow), *options])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    check_results(found, "it")
    base, model = (row["generation"] for row in found["rows"])
    assert base["same"] is None and (model["prompts"], model["same"]) == (2, 2)
