"""Multiple-choice questions from a local file: accuracy, and the model beside its base.

A file is JSON lines, `{"question": "...", "choices": ["...", ...], "answer": 0}`; `answer` is the
place of the right choice from 0, its letter from A, or the choice itself. The choice whose tokens
have the highest summed log-probability behind the question is the model's (accuracy), or the one
with the highest sum over its number of characters (by length), as lm-eval has both. Between them
stands a space, and the text begins with what the tokenizer puts before a text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError, no_file
from .perplexity import Scorer, negative_log_likelihood
from .protocols import tokenizing
from .told import Teller, predicted
from .windows import Window

LARGEST = 256 << 20  # bytes of a file


class Question(NamedTuple):
    """`answer`: the place of the right one among `choices`."""

    question: str
    choices: tuple[str, ...]
    answer: int


class Task(NamedTuple):
    """A file's questions under the file's name."""

    name: str
    questions: list[Question]


class Answers(NamedTuple):
    """Of each question whether the model's choice is right: by sum, and by length."""

    right: list[bool]
    right_norm: list[bool]


class Paired(NamedTuple):
    """Questions that the base alone, the model alone, both and neither got right (by sum), and the
    probability of a split so uneven, or more so, where both are equally good."""

    only_base: int
    only_model: int
    both: int
    neither: int
    p_value: float


class TaskResult(NamedTuple):
    """Shares of right answers with standard errors (None of one question); `paired`: against the
    base, None of the base itself."""

    task: str
    questions: int
    accuracy: float
    accuracy_stderr: float | None
    accuracy_norm: float
    accuracy_norm_stderr: float | None
    paired: Paired | None


def read_task(path: str | Path) -> Task:
    """The questions of a .jsonl file; UserError naming the line of the first that is none."""
    path = Path(path)
    if not path.is_file():
        raise no_file(path, "task file", "--tasks takes .jsonl files of questions")
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} is larger than {LARGEST >> 20} MiB; cut it into several files")
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text ({e}); convert it to UTF-8") from e
    for number, line in enumerate(lines, 1):
        if line.strip():
            questions.append(_question(line, f"{path}, line {number}"))
    if not questions:
        raise UserError(f"{path} holds no question")
    return Task(path.stem, questions)


def _question(line: str, where: str) -> Question:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where} is no JSON: {e}") from e
    value = value if isinstance(value, dict) else {}
    text, choices = value.get("question"), value.get("choices")
    if not isinstance(text, str) or not isinstance(choices, list) or len(choices) < 2:
        raise UserError(
            f'{where} must be {{"question": "...", "choices": ["...", "..."], "answer": 0}}'
        )
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise UserError(f"{where}: each choice must be a text that is not empty")
    return Question(text, tuple(choices), _place(value.get("answer"), choices, where))


def _place(answer: Any, choices: list[str], where: str) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if choices.count(answer) == 1:
            return choices.index(answer)
        letter = ord(answer) - ord("A") if len(answer) == 1 else -1
        if 0 <= letter < len(choices):
            return letter
    raise UserError(
        f"{where}: answer must be a place from 0 to {len(choices) - 1}, a letter from A to "
        f"{chr(ord('A') + len(choices) - 1)} or one of the choices, got {answer!r}"
    )


def encoded(question: Question, tokenizer: Any) -> list[tuple[Tensor, int]]:
    """Of each choice the token ids int64 [T] of question and choice, and where the choice begins.

    The whole is tokenized at once, and the choice is what lies behind the question's own tokens.
    UserError where a question is empty and the tokenizer puts nothing before it.
    """
    before = list(tokenizing(tokenizer).prefix)
    context = question.question.rstrip()
    own = _ids(context, tokenizer)
    start = len(before) + len(own)
    if start == 0:
        raise UserError("a question is empty, and the tokenizer puts no token before a text")
    found = []
    for choice in question.choices:
        whole = before + _ids(f"{context} {choice.strip()}", tokenizer)
        found.append((torch.tensor(whole, dtype=torch.long), min(start, len(whole) - 1)))
    return found


def _ids(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def choice_scores(scorer: Scorer | Teller, question: Question, tokenizer: Any) -> Tensor:
    """float64 [choices]: the summed log-probability of each choice's tokens, in nats."""
    sums = []
    for ids, start in encoded(question, tokenizer):
        window = Window(ids, start)
        sums.append(-negative_log_likelihood(predicted(scorer, window), window).sum())
    return torch.stack(sums).cpu()


def answers(scorer: Scorer | Teller, task: Task, tokenizer: Any, progress: Any = None) -> Answers:
    """The model's answers; `progress` is called after each question."""
    found = Answers([], [])
    for question in task.questions:
        sums = choice_scores(scorer, question, tokenizer)
        lengths = torch.tensor([len(choice.strip()) for choice in question.choices])
        found.right.append(int(sums.argmax()) == question.answer)
        found.right_norm.append(int((sums / lengths).argmax()) == question.answer)
        if progress is not None:
            progress()
    return found


def task_result(task: str, model: Answers, base: Answers | None) -> TaskResult:
    """Accuracies and, where the base's answers are given, the two side by side."""
    pair = None if base is None else paired(base.right, model.right)
    n = len(model.right)
    return TaskResult(task, n, *_share(model.right), *_share(model.right_norm), pair)


def _share(right: Sequence[bool]) -> tuple[float, float | None]:
    n, share = len(right), sum(right) / len(right)
    return share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None


def paired(base: Sequence[bool], model: Sequence[bool]) -> Paired:
    """McNemar's exact test: of the questions that the two answer differently, either is right with
    probability 1/2 where they are equally good. Two-sided."""
    pairs = list(zip(base, model, strict=True))
    only_base, only_model = pairs.count((True, False)), pairs.count((False, True))
    return Paired(
        only_base, only_model, pairs.count((True, True)), pairs.count((False, False)),
        two_sided(only_base, only_model),
    )  # fmt: skip


def two_sided(a: int, b: int) -> float:
    """The probability that a fair coin splits a + b throws at least as unevenly."""
    n, fewer = a + b, min(a, b)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)
