"""Tasks of lm-eval are asked as it asks them: our answers are its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from lowbit.evals import lm_eval_tasks
from lowbit.evals.lm_eval_tasks import named_tasks, tasks_of
from lowbit.evals.scorer import load_scorer
from lowbit.evals.tasks import answers
from lowbit.kernels.errors import UserError
from transformers import AutoTokenizer

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not INSTALLED, reason="lm-eval is not installed")
QUESTIONS = [
    {"question": f"What comes after {i}?", "choices": [str(i + 1), f"a {i}", "nothing at all"],
     "answer": i % 3}
    for i in range(12)
]  # fmt: skip
TASK = """
task: riddles
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture
def include(tmp_path: Path) -> Path:
    """A folder with a task of the harness's own form."""
    data = tmp_path / "riddles.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "riddles.yaml").write_text(TASK.format(file=data, kind="multiple_choice"))
    return folder


@needs_lm_eval
def test_a_task_is_its_questions(include: Path) -> None:
    (task,) = named_tasks("riddles", str(include))
    assert (task.name, len(task.questions)) == ("riddles", 12)
    assert task.questions[1] == ("Q: What comes after 1?\nA:", ("2", "a 1", "nothing at all"), 1)
    (few,) = named_tasks("riddles:5", str(include))
    assert few.questions == task.questions[:5]


@needs_lm_eval
def test_the_answers_are_lm_evals_own(include: Path, shallow: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer: Any = AutoTokenizer.from_pretrained(shallow)
    (task,) = named_tasks("riddles", str(include))
    ours = answers(load_scorer(shallow, "float32"), task, tokenizer)
    model = HFLM(pretrained=str(shallow), device="cpu", dtype="float32", batch_size=1)
    manager = TaskManager(include_path=str(include), include_defaults=False)
    theirs: Any = simple_evaluate(model, tasks=["riddles"], task_manager=manager,
                                  bootstrap_iters=0)  # fmt: skip
    samples = sorted(theirs["samples"]["riddles"], key=lambda s: s["doc_id"])
    assert ours.right == [bool(s["acc"]) for s in samples]
    assert ours.right_norm == [bool(s["acc_norm"]) for s in samples]


@needs_lm_eval
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("riddels", "no task file and no task of lm-eval: 'riddels'"),
        ("riddles:0", "NAME or NAME:QUESTIONS, got 'riddles:0'"),
    ],
)
def test_mistakes_are_named(include: Path, asked: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        named_tasks(asked, str(include))


@needs_lm_eval
def test_other_kinds_of_tasks_are_refused(include: Path) -> None:
    file = include / "riddles.yaml"
    file.write_text(file.read_text().replace("multiple_choice", "generate_until"))
    with pytest.raises(UserError, match="'riddles' is generate_until; only multiple choice"):
        named_tasks("riddles", str(include))


def test_files_and_names_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps(QUESTIONS[0]))
    assert tasks_of(str(file))[0].name == "q"
    asked: list[str] = []
    monkeypatch.setattr(lm_eval_tasks, "named_tasks", lambda name: asked.append(name) or [])
    assert tasks_of("arc_easy, hellaswag:200") == [] and asked == ["arc_easy", "hellaswag:200"]
    with pytest.raises(UserError, match="task file"):
        tasks_of(str(tmp_path / "none.jsonl"))


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_the_package_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"pip install 'lowbit\[tasks\]'"):
        named_tasks("arc_easy")
