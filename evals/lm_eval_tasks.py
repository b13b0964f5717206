"""Multiple-choice tasks of the LM Evaluation Harness, as our own questions.

The harness (package lm-eval) says what is asked: documents, prompt, choices, which is right. They
are scored as our own files are, which is its own rule (tasks.py), by whatever computes here, and
model and base side by side. Its data come from the Hub, or from where a task's file says.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..kernels.errors import UserError, did_you_mean
from .tasks import Question, Task, read_task

NEEDED = "tasks by name need the package lm-eval: pip install 'lowbit[tasks]'"


def tasks_of(asked: str) -> list[Task]:
    """Of a .jsonl file of questions, or of names with commas between them."""
    if asked.endswith(".jsonl") or Path(asked).exists():
        return [read_task(asked)]
    return [task for name in asked.split(",") for task in named_tasks(name.strip())]


def named_tasks(asked: str, include: str | None = None) -> list[Task]:
    """The tasks that a name stands for, one or a group's: "arc_easy", or "arc_easy:200" for the
    first 200 questions of each. include: a folder with tasks in place of the harness's own.

    UserError where there is no such task, its data cannot be had, or it is no multiple choice with
    one prompt for all choices.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(NEEDED)
    name, _, count = asked.partition(":")
    if count and not (count.isdecimal() and int(count)):
        raise UserError(f"a task is NAME or NAME:QUESTIONS, got '{asked}'")
    harness, manager = _harness(include)
    if name not in manager.all_tasks:
        raise UserError(
            f"no task file and no task of lm-eval: '{name}'{did_you_mean(name, manager.all_tasks)}"
        )
    try:
        loaded = harness.get_task_dict([name], manager)
    except Exception as e:  # whatever the data set's loader raises
        reason = " ".join(str(e).split())[:300]
        raise UserError(f"the data of task '{name}' cannot be had: {reason}") from e
    limit = int(count) if count else None
    return [_task(label, task, limit) for label, task in _leaves(loaded)]


@functools.cache
def _harness(include: str | None) -> tuple[Any, Any]:
    """lm-eval's module of tasks, and its manager, which reads thousands of files."""
    harness: Any = importlib.import_module("lm_eval.tasks")
    own = include is None
    return harness, harness.TaskManager(include_path=include, include_defaults=own)


def _leaves(loaded: Any) -> Iterator[tuple[str, Any]]:
    """The tasks in groups of groups, by name."""
    for label, value in loaded.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif value is not None:
            yield str(label), value


def _task(label: str, task: Any, limit: int | None) -> Task:
    if task.OUTPUT_TYPE != "multiple_choice":
        raise UserError(f"task '{label}' is {task.OUTPUT_TYPE}; only multiple choice is asked here")
    questions = []
    for doc in task.eval_docs:
        if len(questions) == limit:
            break
        questions.append(_question(label, task, doc))
    return Task(label, questions)


def _question(label: str, task: Any, doc: Any) -> Question:
    context = task.fewshot_context(doc, task.config.num_fewshot or 0)
    choices, answer = task.doc_to_choice(doc), task.doc_to_target(doc)
    one_prompt = isinstance(context, str) and not getattr(task, "multiple_input", 0)
    if not one_prompt or task.config.target_delimiter != " " or not isinstance(answer, int | str):
        raise UserError(f"task '{label}' has another form than one prompt, a space and a choice")
    place = answer if isinstance(answer, int) else choices.index(answer)
    return Question(context, tuple(choices), place)
