"""What is thrown at the server harms nobody else: poisoned requests, a crowd of odd clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lowbit.evals.server_soak import Load, gauges, put_under
from lowbit.runtime.paged_engine import PagedEngine
from lowbit.runtime.scheduling.integrity import check_scheduler

from .runtime_models import FAMILIES, save_tiny
from .serving import Served, served

GOOD = {"prompt": "a good one", "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder: Path = save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())
    with served(folder, max_body_bytes=1 << 20) as running:
        yield running


def _json(**body: object) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 4, **body}).encode()


def _chat(**body: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **body}).encode()


def _nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
POISONS: dict[str, tuple[str, bytes]] = {
    "invalid UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe\x80"}'),
    "half a character": (COMPLETIONS, b'{"prompt": "\\ud800"}'),
    "half a character in a stop string": (COMPLETIONS, _json(stop="\ud800")),
    "half a character in an unknown field": (COMPLETIONS, b'{"prompt": "x", "\\ud800": 1}'),
    "a prompt of 10 MB": (COMPLETIONS, _json(prompt="x" * 10_000_000)),
    "a prompt as long as a body may be": (COMPLETIONS, _json(prompt="x" * 1_000_000)),
    "deep JSON": (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep metadata": (COMPLETIONS, b'{"prompt": "x", "metadata": {"a": ' + b"[" * 5000 + b"]" * 5000
                      + b"}}"),
    "no JSON": (COMPLETIONS, b"prompt=x"),
    "nothing": (COMPLETIONS, b""),
    "null": (COMPLETIONS, b"null"),
    "a bias that is no number": (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"5": NaN}}'),
    "an infinite bias": (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"5": Infinity}}'),
    "an infinite temperature": (COMPLETIONS, b'{"prompt": "x", "temperature": Infinity}'),
    "a tiny temperature": (COMPLETIONS, _json(temperature=1e-300)),
    "every token pushed down": (COMPLETIONS, _json(logit_bias={str(i): -100 for i in range(272)})),
    "negative max_tokens": (COMPLETIONS, _json(max_tokens=-1)),
    "a huge max_tokens": (COMPLETIONS, _json(max_tokens=10**30)),
    "a huge token": (COMPLETIONS, _json(prompt=[10**30])),
    "a negative token": (COMPLETIONS, _json(prompt=[-1])),
    "a huge seed": (COMPLETIONS, _json(seed=10**30)),
    "unknown fields": (COMPLETIONS, _json(**{f"f{i}": i for i in range(1000)})),
    "a deep schema": (CHATS, _chat(structured_outputs={"json": _nested(400)})),
    "a schema as text that is none": (CHATS, _chat(structured_outputs={"json": "{" * 5000})),
    "a schema that refers to itself": (CHATS, _chat(max_tokens=8, structured_outputs={
        "json": {"$ref": "#"}})),
    "a deep expression": (CHATS, _chat(structured_outputs={"regex": "(" * 9000 + ")" * 9000})),
    "an expression that repeats itself": (CHATS, _chat(
        max_tokens=4, structured_outputs={"regex": "((a{1,99}){1,99}){1,99}"})),
    "a grammar that goes in circles": (CHATS, _chat(
        max_tokens=4, structured_outputs={"grammar": 'root ::= a\na ::= a | "x"'})),
    "a grammar without a way out": (CHATS, _chat(
        max_tokens=4, structured_outputs={"grammar": "root ::= root"})),
    "messages that are none": (CHATS, b'{"messages": [{"role": "user", "content": {"a": 1}}]}'),
    "a template's inner names": (CHATS, _chat(chat_template_kwargs={"messages": 1, "tokenize": 1})),
    "a picture": (CHATS, _chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
}  # fmt: skip


@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_request_harms_only_itself(server, poison):
    path, body = POISONS[poison]
    clean = server.complete(**GOOD)["choices"]
    headers = {"content-type": "application/json"}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.complete, **GOOD)
        answer = server.http.post(path, content=body, headers=headers)
        assert beside.result()["choices"] == clean
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 3000
    server.idle()
    assert server.http.get("/health").status_code == 200


def test_a_crowd_of_odd_clients_leaves_nothing_behind(server):
    """64 at once: short and long, of which some hang up and some read slowly."""
    tally = asyncio.run(put_under(server.url, Load(64, 120, requests=128, prompt=60)))
    assert not tally.wrong
    ends = tally.ends
    assert ends["answered"] + ends["refused"] + ends["left"] == ends["begun"] >= 128
    assert ends["answered"] > 64 and ends["left"] > 1
    server.idle()
    engine = server.service.loaded.engine._engine
    assert isinstance(engine, PagedEngine) and not engine._live
    check_scheduler(engine._scheduler)
    told = gauges(server.http.get("/metrics").text)
    assert told == {
        "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0,
    }  # fmt: skip
    left = [x for x in server.requests() if x["outcome"] == "client_gone" and "ttft" in x]
    assert left and all(x["completion_tokens"] < 48 for x in left), "who leaves is noticed"
