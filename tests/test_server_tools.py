"""Calls of tools: found in what models write, forced where a request says so, streamed whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from lowbit.runtime.server.tools import Call, Hermes, Llama3, Said
from transformers import AutoTokenizer

from .runtime_models import FAMILIES, save_tiny
from .serving import NAME, Served, served

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY = {**CITY, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("weather", "time")
]
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder: Path = save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1024
    (folder / "config.json").write_text(json.dumps(config))
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def parsed(parser: Any, text: str, size: int) -> Said:
    """What a text that comes in pieces of `size` is in all."""
    pieces = [parser.push(text[i : i + size]) for i in range(0, len(text), size)]
    pieces.append(parser.finish())
    return Said("".join(p.text for p in pieces), [c for p in pieces for c in p.calls])


WEATHER, TIME = Call("weather", ROME), Call("time", "{}")
HERMES = [
    ("no call, 1 < 2 <tool", "no call, 1 < 2 <tool", []),
    (f"well {CALL} and {CALL}", "well  and ", [WEATHER, WEATHER]),
    (CALL.removesuffix("</tool_call>"), "", [WEATHER]),
    ("<tool_call>no JSON</tool_call>!", "<tool_call>no JSON</tool_call>!", []),
    ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
    ("<tool_call>{", "<tool_call>{", []),
]
LLAMA = [
    ("plain text {", "plain text {", []),
    (f'{{"name": "weather", "parameters": {ROME}}}', "", [WEATHER]),
    (f'<|python_tag|>{{"name": "weather", "parameters": {ROME}}}', "", [WEATHER]),
    (f' {{"name": "weather", "parameters": {ROME}}}; {{"name": "time"}}', "", [WEATHER, TIME]),
    ('{"answer": 42}', '{"answer": 42}', []),
    ('{"name": "weather"} and text', '{"name": "weather"} and text', []),
    ('{"name": "wea', '{"name": "wea', []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "text", "rest", "calls"),
    [(Hermes, *case) for case in HERMES] + [(Llama3, *case) for case in LLAMA],
)
def test_calls_are_found_however_the_text_comes(parser, text, rest, calls, size):
    assert parsed(parser({"weather", "time"}), text, size) == Said(rest, calls)


def test_text_is_not_held_back_longer_than_it_could_begin_a_call():
    parser = Hermes({"weather"})
    assert parser.push("a < b <tool").text == "a < b "
    assert parser.push("s").text == "<tools"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_writes_comes_back_as_calls(client, stream):
    asked = {
        **ASKED, "max_tokens": 400, "extra_body": {"structured_outputs": {"choice": [f"ok {CALL}"]}}
    }  # fmt: skip
    if stream:
        parts = [c for e in client.chat.completions.create(**asked, stream=True) for c in e.choices]
        calls = [c for p in parts for c in p.delta.tool_calls or []]
        content = "".join(p.delta.content or "" for p in parts)
        reason = parts[-1].finish_reason
        assert [c.index for c in calls] == [0]
    else:
        (choice,) = client.chat.completions.create(**asked).choices
        calls, content, reason = (
            choice.message.tool_calls,
            choice.message.content,
            choice.finish_reason,
        )
    assert content.strip() == "ok" and reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in calls] == [("weather", ROME)]
    assert calls[0].id.startswith("call_")


def test_a_named_tool_is_called(client):
    choice = {"type": "function", "function": {"name": "time"}}
    answer = client.chat.completions.create(**ASKED, tool_choice=choice, max_tokens=300, seed=1)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "time" and json.loads(call.function.arguments)["city"]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_some_tool_is_called_where_one_must_be(server, client):
    blanks = server.post("/tokenize", {"prompt": " \n\r\t"}).json()["tokens"]
    asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    asked["logit_bias"] = {str(token): -100 for token in blanks}  # JSON allows any number of them
    for seed in range(3):
        answer = client.chat.completions.create(**asked, seed=seed)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name in ("weather", "time")
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_tools_and_earlier_calls_reach_the_template(server):
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": ROME}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "a"},
    ]
    ids = server.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text.startswith(json.dumps(TOOLS)) and text.endswith(f"[assistant]{ROME}[tool]noon")
    without = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert len(without) < len(ids)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "mean 'weather'"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "leave response"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "alike"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": {
            "name": "f", "arguments": "{"}}]}]}, "are no JSON"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_are_refused(server, more, part):
    answer = server.post("/v1/chat/completions", {**ASKED, **more})
    assert answer.status_code == 400 and part in answer.json()["error"]["message"]


def test_a_template_that_takes_no_tools_is_said_to(tmp_path):
    with served(save_tiny(tmp_path / "m", FAMILIES["llama"]())) as server:
        answer = server.post("/v1/chat/completions", ASKED)
        assert answer.status_code == 400 and "takes no tools" in answer.json()["error"]["message"]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_the_mean_of_the_last_hidden_states(server, client, form):
    import torch

    texts = ["one", "another text"]
    answer = client.embeddings.create(model=NAME, input=texts, encoding_format=form)
    llm = server.service.loaded.engine.llm
    for text, told in zip(texts, answer.data, strict=True):
        vector = told.embedding
        if isinstance(vector, str):
            import base64

            import numpy

            vector = numpy.frombuffer(base64.b64decode(vector), "<f4").tolist()
        ids = torch.tensor([llm.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            hidden = llm.model(ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        expected = torch.nn.functional.normalize(hidden[0].mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(vector), expected, atol=1e-5, rtol=1e-4)
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    with pytest.raises(openai.BadRequestError, match="this model has 64"):
        client.embeddings.create(model=NAME, input="x", dimensions=8)
