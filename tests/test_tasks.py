"""Multiple-choice tasks: scores are the model's own sums, files are checked, pairs are counted."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.text import load_text, load_tokenizer
from lowbit.evals.measure import measure_models
from lowbit.evals.scorer import load_scorer
from lowbit.evals.tasks import (
    Answers,
    Question,
    Task,
    answers,
    choice_scores,
    encoded,
    paired,
    read_task,
    task_result,
    two_sided,
)
from lowbit.evals.windows import Windowing
from lowbit.kernels.errors import UserError

GOOD = {"question": "Once upon a", "choices": ["time", "xylophone"], "answer": 0}


@pytest.fixture(scope="module")
def stories() -> Path:
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained model to ask")
    return Path(folder) / "stories260k"


def questions() -> list[Question]:
    return [
        Question("Once upon a", ("time there was", "qqq zzz"), 0),
        Question("She was very", ("xkcd vw", "happy"), 1),
        Question("The dog ran to the", ("park", "j7!"), 1),
    ]


def test_scores_are_the_sums_of_the_choices_tokens(stories: Path) -> None:
    scorer, tokenizer = load_scorer(stories), load_tokenizer(stories)
    for question in questions():
        found = choice_scores(scorer, question, tokenizer)
        for choice, got in zip(question.choices, found.tolist(), strict=True):
            context = tokenizer(question.question).input_ids
            whole = tokenizer(f"{question.question} {choice}").input_ids
            assert whole[: len(context)] == context
            with torch.no_grad():
                logits = scorer.model(torch.tensor([whole])).logits[0].log_softmax(-1)
            want = sum(logits[i - 1, whole[i]].item() for i in range(len(context), len(whole)))
            assert got == pytest.approx(want, rel=1e-5)


def test_a_trained_model_prefers_what_goes_on(stories: Path) -> None:
    found = answers(load_scorer(stories), Task("t", questions()), load_tokenizer(stories))
    assert found.right == [True, True, False], "the third answer is meant to be wrong"
    assert len(found.right_norm) == 3


def test_length_counts_for_the_second_score() -> None:
    """Sums -4 and -5 over 2 and 10 characters: the first by sum, the second by length."""

    class Letters:
        bos_token_id = None

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) % 7 for c in text]}

    sums = iter([-4.0, -5.0])

    def scorer(ids: torch.Tensor) -> torch.Tensor:
        """Logits by which each of the choice's n tokens has probability exp(sum / n)."""
        start = len("Q")
        each = next(sums) / (ids.shape[1] - start)
        logits = torch.full((ids.shape[1], 7), math.log((1 - math.exp(each)) / 6))
        for place in range(1, ids.shape[1]):
            logits[place - 1, ids[0, place]] = each
        return logits

    task = Task("t", [Question("Q", ("ab", "abcdefghij"), 1)])
    assert answers(scorer, task, Letters()) == Answers([False], [True])


def test_the_text_begins_as_texts_do_and_an_empty_question_needs_that(stories: Path) -> None:
    tokenizer = load_tokenizer(stories)
    ids, start = encoded(Question("", ("time", "park"), 0), tokenizer)[0]
    assert ids[0] == tokenizer.bos_token_id and start == 1

    class Bare:
        bos_token_id = None

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text]}

    with pytest.raises(UserError, match="a question is empty"):
        encoded(Question("", ("time", "park"), 0), Bare())


def test_pairs_are_counted_and_tested_exactly() -> None:
    base = [True] * 8 + [False] * 2 + [True] * 5 + [False] * 3
    model = [False] * 8 + [True] * 2 + [True] * 5 + [False] * 3
    found = paired(base, model)
    assert found[:4] == (8, 2, 5, 3)
    assert found.p_value == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert two_sided(0, 0) == two_sided(3, 3) == 1.0
    assert two_sided(0, 6) == pytest.approx(2 / 64)
    assert two_sided(2000, 2200) == two_sided(2200, 2000) < 0.01
    result = task_result("t", Answers(model, base), Answers(base, base))
    assert result.accuracy == 7 / 18 and result.accuracy_norm == 13 / 18
    assert result.accuracy_stderr == pytest.approx(math.sqrt(7 / 18 * 11 / 18 / 17))
    assert task_result("t", Answers([True], [True]), None)[3:] == (None, 1.0, None, None)


def test_answers_are_places_letters_or_texts(tmp_path: Path) -> None:
    file = tmp_path / "riddles.jsonl"
    lines = [GOOD, {**GOOD, "answer": "B"}, {**GOOD, "answer": "xylophone"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    task = read_task(file)
    assert task.name == "riddles" and [q.answer for q in task.questions] == [0, 1, 1]
    assert task.questions[0].choices == ("time", "xylophone")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", 'line 2 must be {"question"'),
        ({**GOOD, "choices": ["one"]}, "line 2 must be"),
        ({**GOOD, "choices": ["one", " "]}, "each choice must be a text"),
        ({**GOOD, "answer": 2}, "a place from 0 to 1, a letter from A to B .* got 2"),
        ({**GOOD, "answer": True}, "got True"),
        ({**GOOD, "answer": "C"}, "got 'C'"),
        ({"question": "a", "choices": ["b", "c"]}, "got None"),
    ],
)
def test_lines_that_are_no_question_are_named(tmp_path: Path, line: Any, message: str) -> None:
    file = tmp_path / "t.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_text(f"{json.dumps(GOOD)}\n{text}\n")
    with pytest.raises(UserError, match=message):
        read_task(file)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such task file"):
        read_task(tmp_path / "arc_easy")
    with pytest.raises(UserError, match="is a folder, not a task file"):
        read_task(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_task(tmp_path / "b.jsonl")
    (tmp_path / "e.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no question"):
        read_task(tmp_path / "e.jsonl")


def test_a_report_sets_the_model_beside_its_base(stories: Path) -> None:
    text = load_text(str(stories.parent / "text" / "tinystories_valid.txt"), "evaluation")
    models = {"base": stories, "padded": stories.with_name("stories260k-ffn192")}
    task = Task("three", questions())
    found = measure_models(models, text, Windowing(64, 64, windows=1), base="base", tasks=[task])
    base, padded = (row.tasks for row in found.rows)
    assert base is not None and padded is not None
    assert base[0].paired is None and base[0].accuracy == pytest.approx(2 / 3)
    assert padded[0].paired == (0, 0, 2, 1, 1.0), "the same function"
    assert "padded, task three, 3 questions: 66.67%" in found.to_markdown()
