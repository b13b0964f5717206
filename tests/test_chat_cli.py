"""`quantize chat`: history, /reset and /exit, and Ctrl-C, which ends an answer but not the talk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.chat import Conversation, chat
from lowbit.runtime import LLM, SamplingParams
from typer.testing import CliRunner

from .runtime_models import FAMILIES, save_tiny

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, "cpu", "float32")


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """The conversations that models are asked to answer, in place of answers that differ."""
    seen: list[Any] = []
    stream = LLM.stream

    def spy(self: LLM, prompt: Any, params: Any = None) -> Iterator[Any]:
        seen.append([dict(m) for m in prompt])
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", spy)
    return seen


def talked(folder: Path, *lines: str, options: tuple[str, ...] = ()) -> Any:
    app = typer.Typer()
    app.command()(chat)
    arguments = [str(folder), "--temperature", "0", "--max-tokens", "8", *options]
    result = CliRunner().invoke(app, arguments, input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.exception
    return result


def test_answers_are_those_of_the_conversation_so_far(folder, llm, asked):
    result = talked(
        folder, "one", "", "two", options=("--system", "be brief", "--dtype", "float32")
    )
    greedy = SamplingParams(max_tokens=8, temperature=0)
    history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    answer = llm.chat(history, greedy)[0].outputs[0].text
    assert asked == [
        history,
        [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": "two"}],
    ]
    assert answer in result.stdout and not result.stdout.startswith("> "), "no prompt into a pipe"
    assert llm.chat(asked[1], greedy)[0].outputs[0].text in result.stdout


def test_reset_forgets_and_exit_leaves(folder, asked):
    result = talked(folder, "one", "/reset", "two", "/nonsense", "/exit", "three")
    assert asked == [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]
    assert "forgotten" in result.stderr and "there is no /nonsense" in result.stderr


def test_verbose_tells_what_an_answer_took(folder):
    told = talked(folder, "one", "two", options=("--verbose",)).stderr
    assert told.count("first token after") == 2 and "0 of them known" in told


def test_a_conversation_that_is_too_long_is_told_and_not_kept(folder, asked):
    result = talked(folder, "x" * 300, "short")
    assert "shorten it (/reset forgets what was said)" in result.stderr
    assert asked[1] == [{"role": "user", "content": "short"}]


def test_ctrl_c_stops_the_answer_and_not_the_program(folder, monkeypatch):
    stream = LLM.stream
    seen: list[Any] = []

    def interrupted(self: LLM, prompt: Any, params: Any = None) -> Iterator[Any]:
        seen.append(list(prompt))
        for number, piece in enumerate(stream(self, prompt, params)):
            if number == 2 and len(seen) == 1:
                signal.raise_signal(signal.SIGINT)
            yield piece

    monkeypatch.setattr(LLM, "stream", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = talked(folder, "one", "two", options=("--max-tokens", "100", "--dtype", "float32"))
    assert "stopped" in result.stderr and len(seen) == 2
    answer = seen[1][1]["content"]
    assert seen[1][1]["role"] == "assistant" and 0 < len(answer) < 40
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_is_left_frees_its_blocks_and_stays_as_far_as_it_came(llm):
    conversation = Conversation(llm, PARAMS)
    answer = conversation.answer("one")
    pieces = [next(answer), next(answer)]
    answer.close()
    assert conversation.messages[1] == {"role": "assistant", "content": "".join(pieces)}
    llm.generate("x", PARAMS, use_tqdm=False)
    assert llm.metrics().running == 0 and llm.metrics().kv_usage == 0


def test_a_model_without_a_template_is_refused(tmp_path):
    bare = save_tiny(tmp_path / "bare", FAMILIES["llama"](), tokenizer=False)
    app = typer.Typer()
    app.command()(chat)
    result = CliRunner().invoke(app, [str(bare)])
    assert isinstance(result.exception, UserError)
    assert "has no chat template: take `quantize generate`" in str(result.exception)
