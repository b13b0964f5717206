"""The server's routes: what comes back is what the engine gives, in the form that clients know."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from lowbit.runtime import LLM, SamplingParams

from .runtime_models import FAMILIES, save_tiny
from .serving import NAME, Served, served, until

GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TALK = {"messages": CHAT, "max_tokens": 6, **GREEDY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, "cpu", "float32")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def expected(llm: LLM, prompt: Any, **params: Any) -> Any:
    """What the engine makes of it."""
    asked = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    return llm.generate(prompt, asked, use_tqdm=False)[0]


def test_a_completion_is_what_the_engine_gives(server, llm):
    answer = server.complete("hello", max_tokens=7, **GREEDY)
    told = expected(llm, "hello", max_tokens=7)
    (choice,) = answer["choices"]
    assert choice["text"] == told.outputs[0].text and choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion" and answer["model"] == NAME
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 7, 12)


def test_several_prompts_in_any_form_come_back_in_order(server, llm):
    texts = [expected(llm, p, max_tokens=4).outputs[0].text for p in ("one", "two!")]
    ids = [llm.tokenizer(p)["input_ids"] for p in ("one", "two!")]
    for prompts in (["one", "two!"], ids):
        answer = server.complete(prompts, max_tokens=4, **GREEDY)
        assert [c["text"] for c in answer["choices"]] == texts
        assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert server.complete(ids[0], max_tokens=4, **GREEDY)["choices"][0]["text"] == texts[0]


def test_n_seed_and_stop_reach_the_sampler(server, llm):
    asked = {"max_tokens": 12, "n": 3, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    told = expected(llm, "x", **asked).outputs
    answer = server.complete("x", **asked)
    assert [c["text"] for c in answer["choices"]] == [c.text for c in told]
    stop = told[0].text[3:5]
    stopped = server.complete("x", **{**asked, "n": 1}, stop=[stop])["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == stop
    assert stopped["text"] == told[0].text[: told[0].text.index(stop)]


@pytest.mark.parametrize("stop", [None, "\x1d"])
def test_a_streams_pieces_add_up_to_the_whole(server, stop):
    asked = {
        "prompt": ["ab", "cd"], "n": 2, "seed": 3, "max_tokens": 9, "logprobs": 2, "stop": stop,
        "ignore_eos": True,
    }  # fmt: skip
    whole = server.complete(**asked)
    events = server.events("/v1/completions", {**asked, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(p["text"] for p in parts) == choice["text"]
        assert [p["finish_reason"] for p in parts][-1] == choice["finish_reason"]
        assert not any(p["finish_reason"] for p in parts[:-1]), "nothing comes after the end"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((p["logprobs"][name] for p in parts), []) == choice["logprobs"][name]


def test_echo_puts_the_prompt_and_its_logprobs_first(server, llm):
    asked = {"max_tokens": 2, "logprobs": 1, **GREEDY}
    choice = server.complete("abc", echo=True, **asked)["choices"][0]
    told = expected(llm, "abc", max_tokens=2, logprobs=1, prompt_logprobs=1)
    assert choice["text"] == "abc" + told.outputs[0].text
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "b", "c"] and logprobs["token_logprobs"][0] is None
    ids = told.prompt_token_ids
    own = [told.prompt_logprobs[i][ids[i]].logprob for i in (1, 2)]
    assert logprobs["token_logprobs"][1:3] == pytest.approx(own, abs=1e-4)
    assert logprobs["text_offset"][:4] == [0, 1, 2, 3]


def test_a_chat_is_the_template_gone_on(server, llm, client):
    told = llm.chat(CHAT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), False)[0]
    answer = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=6, temperature=0, extra_body={"ignore_eos": True},
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == told.outputs[0].text
    assert answer.usage.prompt_tokens == len(told.prompt_token_ids)
    assert len(choice.logprobs.content) == 6
    assert all(len(p.top_logprobs) == 2 for p in choice.logprobs.content)
    likeliest = [p.top_logprobs[0] for p in choice.logprobs.content]
    assert [p.logprob for p in choice.logprobs.content] == [p.logprob for p in likeliest]


def test_the_openai_client_streams_a_chat(client):
    asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 8, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(p.delta.content or "" for p in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason


def test_parts_of_a_message_and_newer_roles_are_understood(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answers = [
        server.post("/tokenize", {"messages": messages}).json()["tokens"]
        for messages in (
            [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}],
            [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}],
        )
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_the_answer_is_json_where_it_is_asked_for(server, kind):
    schema = {
        "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    wanted: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        wanted["json_schema"] = {"name": "answer", "schema": schema, "strict": True}
    asked = {"messages": CHAT, "max_tokens": 40, "response_format": wanted, "seed": 0}
    answer = server.post("/v1/chat/completions", asked).json()["choices"][0]
    if kind == "json_schema":
        assert json.loads(answer["message"]["content"])["a"] in ("x", "y")
        assert answer["finish_reason"] == "stop"
    else:
        assert answer["message"]["content"].startswith("{")


def test_structured_outputs_are_vllms(server):
    answer = server.complete("x", max_tokens=20, structured_outputs={"regex": "(ab){2}"}, seed=1)
    assert answer["choices"][0]["text"] == "abab"


def test_tokenize_and_detokenize_are_each_others_inverse(server):
    told = server.post("/tokenize", {"prompt": "añb", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == 4 and told["max_model_len"] == 256
    assert len(told["token_strs"]) == 4
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "añb"}


def test_the_model_and_the_version_are_told(server, client):
    (model,) = client.models.list().data
    assert model.id == NAME and client.models.retrieve(NAME).id == NAME
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert server.http.get("/health").json() == {"status": "ready"}


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"prompt": []}, 400, "from 1 to 256"),
    ({"prompt": ["a"] * 257}, 400, "from 1 to 256"),
    ({"prompt": "x" * 256}, 422, "256 tokens"),
    ({"prompt": [99999]}, 400, "out of the vocabulary"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature"),
    ({"prompt": "x", "frobnicate": 1}, 400, "unknown field: frobnicate"),
    ({"prompt": "x", "model": "other"}, 404, "there is no model 'other'"),
    ({"prompt": "x", "logit_bias": {"5": 1000}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"abc": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "n": 17, "max_tokens": 2}, 422, "max_num_seqs, 16"),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ({"prompt": "x", "best_of": 4}, 400, "best_of"),
    (
        {"prompt": "x", "stream": False, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
    ),
    ({"prompt": "x", "structured_outputs": {"regex": "(" * 9}}, 400, "structured outputs"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "json_schema"),
    ({}, 400, "prompt"),
]


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"prompt": {"a": 1}}, "prompt", "a string, a list of strings, a list of token"),
    ("completions", {"prompt": [1, "a"]}, "prompt", 'lists of token ids, got [1, "a"]'),
    ("completions", {"prompt": ["a", None]}, "prompt", 'got ["a", null]'),
    ("completions", {"prompt": "x", "n": 0}, "n", "n must be at least 1, got 0"),
    ("completions", {"prompt": "x", "n": "1"}, "n", 'n must be a whole number, got "1"'),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "must be at most 20, got 21"),
    ("completions", {"prompt": "x", "stop": ["a", 5]}, "stop[1]", "must be a string, got 5"),
    ("completions", {"prompt": "x", "stop": 5}, "stop", "a string or a list of strings, got 5"),
    ("completions", {"prompt": "x", "seed": "y" * 99}, "seed", f'number, got "{"y" * 60}"...'),
    ("completions", {"prompt": "x", "logit_bias": {"5": "a"}}, "logit_bias.5", 'number, got "a"'),
    ("completions", {"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type",
     "must be 'text', 'json_object' or 'json_schema', got \"xml\""),
    ("completions", {}, "prompt", "prompt is missing"),
    ("completions", {"prompt": None}, "prompt", "prompt is missing"),
    ("chat/completions", {"messages": []}, "messages", "must have at least 1 item"),
    ("chat/completions", {"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role",
     "'assistant' or 'tool', got \"bot\""),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type", "must be 'text', got \"image_url\""),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content",
     "a string or a list of parts, got 5"),
    *(("chat/completions", {"messages": [*CHAT, entry]}, "messages[2].content", "is missing")
      for entry in ({"role": "user"}, {"role": "system", "content": None}, {"role": "assistant"},
                    {"role": "user", "content": []}, {"role": "tool", "tool_call_id": "1"})),
    ("chat/completions", {"messages": CHAT, "tool_choice": "any"}, "tool_choice",
     "'none', 'auto' or 'required' or an object, got \"any\""),
    ("chat/completions", {"messages": CHAT, "tool_choice": {"type": "function"}},
     "tool_choice.function", "tool_choice.function is missing"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 999}]}, "messages",
     "shorten it"),
    ("embeddings", {"input": "x" * 999}, "input", "shorten it"),
    ("embeddings", {"input": 5}, "input", "input must be a string, a list"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "part"), WRONG)
def test_a_refusal_names_the_field_as_it_was_written_and_what_stood_there(
    server, path, body, param, part
):
    answer = server.post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 422) and error["param"] == param, error
    assert part in error["message"] and param in error["message"] + " messages input", error


@pytest.mark.parametrize(
    ("content", "kind", "status", "part"),
    [
        (b'{"prompt": x}', "application/json", 400, "no JSON: Expecting value at character 11"),
        (b'{"prompt": "\xff"}', "application/json", 400, "no UTF-8: invalid start byte at byte 12"),
        (b"", "application/json", 400, "the body is empty"),
        (b"[]", "application/json", 400, "the body must be an object, got []"),
        (b"[" * 100_000, "application/json", 400, "too deep"),
        (b'{"prompt": "x"}', None, 415, "Content-Type: application/json"),
        (b'{"prompt": "x"}', "text/plain", 415, "Content-Type: application/json"),
    ],
)
def test_a_body_that_cannot_be_read_is_said_to_be_so(server, content, kind, status, part):
    headers = {} if kind is None else {"content-type": kind}
    answer = server.http.post("/v1/completions", content=content, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == status and part in error["message"], error
    assert error["param"] is None


def test_null_is_as_good_as_nothing(server):
    nulls = dict.fromkeys(("n", "echo", "stream", "logprobs", "stop", "seed"))
    assert len(server.complete("x", **nulls, max_tokens=2)["choices"]) == 1


@pytest.mark.parametrize(("body", "status", "part"), BAD)
def test_what_cannot_be_is_refused_in_openais_form(server, body, status, part):
    for stream in (False, True):
        answer = server.post("/v1/completions", {"stream": stream, **body})
        error = answer.json()["error"]
        assert answer.status_code == status, error
        assert part in error["message"] or error["param"] == part
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"


def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.UnprocessableEntityError, match="shorten it"):
        client.completions.create(model=NAME, prompt="x" * 300)


def test_other_paths_and_methods_are_errors_of_the_same_form(server):
    assert server.http.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    answer = server.http.get("/v1/completions")
    assert answer.status_code == 405 and "error" in answer.json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_request_along(server, stream):
    server.idle()
    asked = {"prompt": "on and on", "max_tokens": 240, "stream": stream, **GREEDY}
    engine = server.service.loaded.engine
    with (
        server.http.stream("POST", "/v1/completions", json=asked)
        if stream
        else _asked(server, asked) as answer
    ):
        if stream:
            next(answer.iter_lines())
        until(lambda: engine._engine.has_work)
    server.idle()
    line = until(lambda: [x for x in server.requests() if x["outcome"] == "client_gone"])[-1]
    assert line["status"] == (200 if stream else 499)
    assert line["completion_tokens"] < 240 and line["finish_reasons"] in ([None], ["abort"])


class _asked:
    """A request whose answer nobody waits for."""

    def __init__(self, server: Served, body: Any) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._socket.close()


def test_every_answer_has_an_id_and_the_log_no_text(server):
    answer = server.post(
        "/v1/completions", {"prompt": "secret words", "max_tokens": 2},
        headers={"x-request-id": "mine-1"},
    )  # fmt: skip
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    line = until(lambda: [x for x in server.requests() if x["request_id"] == "mine-1"])[0]
    assert line["prompt_tokens"] == 12 and line["status"] == 200 and line["completion_tokens"] == 2
    assert "secret" not in json.dumps(server.log)
    odd = server.http.get("/version", headers={"x-request-id": "a b\t{}"}).headers["x-request-id"]
    assert len(odd) == 32
