"""Fields of a request that the engine reads: the one that is wrong is named, and `priority`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.serve import as_policy
from lowbit.runtime import LLM

from .runtime_models import FAMILIES, save_tiny
from .serving import Served, served, until

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
DEEP: dict[str, Any] = {"type": "array", "minItems": 2, "maxItems": 1}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"), ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"), ({"n": 2, "temperature": 0}, "n"),
    ({"stop": ["a", ""]}, "stop"), ({"stop": ["a"] * 17}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"structured_outputs": {"regex": "(" * 9}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}},
     "response_format"),
    ({"priority": 1}, "priority"), ({"priority": 1 << 31}, "priority"),
    ({"priority": "high"}, "priority"),
]  # fmt: skip
OF_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 2}, "top_logprobs"), ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]  # fmt: skip
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"), ({"prompt": []}, "prompt"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *((CHATS, {**CHAT, **more}, param) for more, param in WRONG + OF_CHATS),
        *((COMPLETIONS, {"prompt": "x", **m}, param) for m, param in WRONG + OF_COMPLETIONS),
    ],
)
def test_the_field_that_is_wrong_is_named(server, path, body, param):
    answer = server.post(path, body)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_priority_without_an_order_of_them_is_refused_with_the_remedy(server):
    for path, body in ((CHATS, CHAT), (COMPLETIONS, {"prompt": "x"})):
        answer = server.post(path, {**body, "priority": -3})
        assert answer.status_code == 422
        assert "--scheduling-policy priority" in answer.json()["error"]["message"]
        for same in (0, None):
            told = server.post(path, {**body, "priority": same, "max_tokens": 1})
            assert told.status_code == 200, told.text


def test_lower_priorities_run_first_on_both_routes(folder):
    def load() -> LLM:
        return LLM(folder, "cpu", "float32", max_num_seqs=1, scheduling_policy="priority")

    few = {"max_tokens": 2, "ignore_eos": True}
    with served(load) as server, ThreadPoolExecutor(4) as pool:
        places = server.service.loaded.places

        def ask(path: str, body: dict[str, Any], taken: int) -> Any:
            asked = pool.submit(server.post, path, body)
            until(lambda: places.taken == taken)
            return asked

        first = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "priority": -9}
        asked = [
            ask(COMPLETIONS, first, 1), ask(COMPLETIONS, {"prompt": "y", **few, "priority": 7}, 2),
            ask(CHATS, {**CHAT, **few, "priority": -2}, 3),
            ask(COMPLETIONS, {"prompt": "z", **few}, 4),
        ]  # fmt: skip
        ids = [told.result().json()["id"] for told in asked]
        lines = until(lambda: len(server.requests()) == 4 and server.requests())
        order = [line["request_id"] for line in lines if "finish_reasons" in line]
        names = [name.partition("-")[2] for name in ids]
        assert order == [names[i] for i in (0, 2, 3, 1)]


def test_a_policy_that_is_none_is_refused():
    assert as_policy("priority") == "priority"
    with pytest.raises(UserError, match="--scheduling-policy must be fcfs or priority, got 'edf'"):
        as_policy("edf")
