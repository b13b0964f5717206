"""Answers given again to texts that are near: what is near, what is kept, and for whom."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.cache_options import check_cache
from lowbit.runtime import LLM
from lowbit.runtime.embeddings import mean_pooled
from lowbit.runtime.server.near_texts import asks_another
from lowbit.runtime.server.semantic_cache import MAX_TRIED, Answer, SemanticCache, near_rows
from lowbit.runtime.server.settings import ServerSettings
from lowbit.runtime.server.text_vectors import CENTRE_TEXTS, OwnVectors, SentenceVectors, centred
from transformers import BertConfig, BertModel, BertTokenizer

from .runtime_models import FAMILIES, save_tiny
from .serving import NAME, Served, served, until

ENTRY = 2000  # bytes, more than one of these tests' takes
HEADER = "x-lowbit-cache"
QUESTION, NEAR = "What is the capital of Australia?", "What is the capital of australia"
TWIN, OTHER = "What is the capital of Austria?", "Please sort 17 numbers for me!"


def unit(*values: float) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.tensor([float(v) for v in values]), dim=0)


def answer(text: str) -> Answer:
    return Answer(text, "stop", None, 3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock | None = None, **limits: Any) -> SemanticCache:
    told = {"threshold": 0.9, "max_entries": 100, "max_bytes": 100 * ENTRY, "ttl": 60.0, **limits}
    return SemanticCache(**told, clock=clock or Clock())


def test_rows_are_those_of_the_group_near_enough_the_nearest_first():
    vectors = torch.stack([unit(1, 0), unit(0.9, 0.1), unit(0, 1), unit(1, 0.05)])
    groups = torch.tensor([7, 7, 7, 8])
    rows = near_rows(vectors, groups, 7, unit(0.9, 0.11), 0.9, 9)
    assert [row for row, _ in rows] == [1, 0]
    for row, cosine in rows:
        assert cosine == pytest.approx(float(vectors[row] @ unit(0.9, 0.11)))
    assert near_rows(vectors, groups, 7, unit(0.9, 0.11), 0.9, 1) == rows[:1]
    assert near_rows(vectors, groups, 9, unit(1, 0), 0.1, 9) == []


@pytest.mark.parametrize(
    ("one", "other", "another"),
    [
        (QUESTION, NEAR, False),
        (QUESTION, "Tell me what the capital of Australia is.", False),
        (QUESTION, TWIN, True),
        ("How do I turn dark mode on?", "How do I turn dark mode off?", True),
        ("trains from Paris to London", "trains from London to Paris", True),
        ("What is 17 times 24?", "17 times 42, what is it?", True),
        ("Is 7 - 3 even?", "Is it that 7 + 3 is even?", True),
        ("What is C?", "What is C++?", True),
        ("Round 3.5 for me", "Please round 35 for me", True),
        ("日本の首都はどこですか", "日本の首都はどこ?", False),
        ("日本の首都はどこですか", "中国の首都はどこですか", True),
        ("", "", False),
    ],
)
def test_texts_that_differ_in_words_in_place_order_numbers_or_signs_ask_another(
    one, other, another
):
    assert asks_another(one, other) == asks_another(other, one) == another


def test_a_near_text_gets_the_answer_of_the_nearest_that_may_ask_the_same():
    cache = make()
    cache.add(b"one", QUESTION, unit(1, 0), answer("Canberra"))
    cache.add(b"one", TWIN, unit(1, 0.01), answer("Vienna"))
    cache.add(b"two", QUESTION, unit(1, 0), answer("another context's"))
    hit = cache.near(b"one", NEAR, unit(1, 0.01))
    assert hit is not None and hit.answer.text == "Canberra" and 0.99 < hit.similarity < 1
    assert cache.near(b"one", OTHER, unit(0, 1)) is None
    assert cache.near(b"three", NEAR, unit(1, 0)) is None
    same = cache.same(b"two", QUESTION)
    assert same is not None and same.similarity == 1 and same.answer.text == "another context's"
    assert cache.same(b"two", NEAR) is None


def test_of_many_texts_of_one_form_few_are_looked_at(monkeypatch):
    """Else a lookup would hold up all others."""
    cache, asked = make(max_entries=1000, max_bytes=500 * ENTRY), []
    for number in range(500):
        turned = unit(math.cos(number / 100), math.sin(number / 100))
        cache.add(b"c", f"weather in city{number}", turned, answer("x"))

    def another(one: str, other: str) -> bool:
        asked.append(one)
        return asks_another(one, other)

    monkeypatch.setattr("lowbit.runtime.server.semantic_cache.asks_another", another)
    assert cache.near(b"c", "weather in Rome", unit(1, 0)) is None
    assert asked == [f"weather in city{number}" for number in range(MAX_TRIED)]


def test_contexts_that_share_a_group_do_not_share_answers():
    cache = make()
    cache.add(b"8 bytes same", QUESTION, unit(1, 0), answer("x"))
    assert cache.near(b"8 bytes other", QUESTION, unit(1, 0)) is None


def test_entries_and_bytes_are_bounded_and_what_was_not_used_for_longest_goes():
    cache = make(max_entries=3)
    for number in range(3):
        cache.add(b"c", f"text {number}", unit(1, number), answer("x"))
    assert cache.same(b"c", "text 0") is not None
    cache.add(b"c", "text 3", unit(1, 3), answer("x"))
    assert [n for n in range(4) if cache.same(b"c", f"text {n}")] == [0, 2, 3]
    assert len(cache) == 3
    few = make(max_bytes=3 * ENTRY)
    for number in range(50):
        few.add(b"c", f"text {number}", unit(1, number), answer("y" * (ENTRY - 1100)))
        assert 0 < few.nbytes <= 3 * ENTRY
    assert len(few) == 3 and few.same(b"c", "text 47") is not None
    few.add(b"c", "large", unit(1, 1), answer("y" * 4 * ENTRY))
    assert few.same(b"c", "large") is None and len(few) == 3


def test_slots_are_used_again_and_the_matrix_grows_no_further_than_it_may():
    cache = make(max_entries=20)
    for number in range(200):
        vector = unit(*torch.randn(8, generator=torch.Generator().manual_seed(number)))
        cache.add(b"c", f"text {number}", vector, answer(str(number)))
        hit = cache.near(b"c", f"text {number}", vector)
        assert hit is not None and hit.answer.text == str(number)
    assert len(cache) == 20 and len(cache._vectors) == 20 and cache._free == []
    assert cache.nbytes == sum(entry.nbytes for entry in cache._entries.values())


def test_answers_grow_old():
    clock = Clock()
    cache = make(clock, ttl=10.0)
    cache.add(b"c", QUESTION, unit(1, 0), answer("x"))
    clock.now = 10.0
    hit = cache.near(b"c", QUESTION, unit(1, 0))
    assert hit is not None and hit.age == 10
    clock.now = 10.1
    assert cache.near(b"c", QUESTION, unit(1, 0)) is None and len(cache) == cache.nbytes == 0
    cache.add(b"c", QUESTION, unit(1, 0), answer("y"))
    cache.add(b"c", QUESTION, None, answer("z"))
    assert len(cache) == 1 and cache.near(b"c", NEAR, unit(1, 0)) is None
    same = cache.same(b"c", QUESTION)
    assert same is not None and same.answer.text == "z" and same.age == 0


# What follows goes over HTTP.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder, semantic_cache=0.9) as running:
        yield running


@pytest.fixture(autouse=True)
def emptied(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        answers = request.getfixturevalue("server").service.loaded.cache.answers
        for entry in list(answers._entries.values()):
            answers._remove(entry)


def chat(text: Any, **more: Any) -> dict[str, Any]:
    before = more.pop("before", [{"role": "system", "content": "be brief"}])
    messages = [*before, {"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 6, "ignore_eos": True, **more}


def ask(server: Served, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str):
    """(what the header says, the answer)."""
    told = server.post(path, body, headers={"cache-control": "", **headers})
    assert told.status_code == 200, told.text
    return told.headers[HEADER].split(";")[0], told.json()


def test_a_near_question_gets_the_answer_with_a_mark(server):
    first, made = ask(server, chat(QUESTION))
    again, given = ask(server, chat(NEAR))
    assert (first, again) == ("miss", "hit")
    assert given["choices"] == made["choices"] and given["id"] != made["id"]
    assert "semantic_cache" not in made and 0.9 <= given["semantic_cache"]["similarity"] < 1
    assert given["usage"]["completion_tokens"] == 6
    assert given["usage"]["prompt_tokens"] == made["usage"]["prompt_tokens"] - 1
    for text in (TWIN, OTHER):
        assert ask(server, chat(text))[0] == "miss"
    state, given = ask(server, chat([{"type": "text", "text": QUESTION}], temperature=None))
    assert state == "hit" and given["semantic_cache"]["similarity"] == 1
    line = until(lambda: [r for r in server.requests() if "similarity" in r])[-1]
    assert line["completion_tokens"] == 6 and line["status"] == 200
    told = server.http.get("/metrics").text
    assert 'lowbit:semantic_cache_lookups_total{outcome="hit"}' in told
    assert 'lowbit:semantic_cache_lookups_total{outcome="miss"}' in told


def test_a_completions_prompt_is_its_text(server):
    body = {"prompt": QUESTION, "max_tokens": 5, "echo": True}
    first, made = ask(server, body, "/v1/completions")
    again, given = ask(server, {**body, "prompt": NEAR}, "/v1/completions")
    assert (first, again) == ("miss", "hit")
    assert made["choices"][0]["text"].removeprefix(QUESTION) == (
        given["choices"][0]["text"].removeprefix(NEAR)
    )
    assert ask(server, chat(QUESTION))[0] == "miss"


CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "near"),
    [
        (CHATS, chat(QUESTION), chat(NEAR)),
        (COMPLETIONS, {"prompt": QUESTION, "max_tokens": 6}, {"prompt": NEAR, "max_tokens": 6}),
    ],
)
def test_a_stream_hits_and_what_was_streamed_is_kept(server, path, body, near):
    told = {"stream_options": {"include_usage": True}}
    made = server.events(path, {**body, **told})
    assert ask(server, near, path)[0] == "hit"
    with server.http.stream("POST", path, json={**near, "stream": True}) as answered:
        assert answered.headers[HEADER].startswith("hit; similarity=0.9")
        assert answered.read().endswith(b"data: [DONE]\n\n")
    given = server.events(path, {**near, **told})
    assert not any("semantic_cache" in event for event in made)
    assert all(event["semantic_cache"]["similarity"] >= 0.9 for event in given)
    assert said(given) == said(made)
    assert given[-2]["choices"][0]["finish_reason"] == made[-2]["choices"][0]["finish_reason"]
    assert given[-1]["usage"]["completion_tokens"] == made[-1]["usage"]["completion_tokens"]


def said(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def test_openais_client_takes_the_mark(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        for expected in ("miss", "hit"):
            told = client.chat.completions.with_raw_response.create(
                model=NAME, messages=chat(QUESTION)["messages"], max_tokens=6
            )
            assert told.headers[HEADER].startswith(expected)
        answered = told.parse()
        assert answered.choices[0].message.content and answered.model_extra["semantic_cache"]


DIFFERENT: list[dict[str, Any]] = [
    {"max_tokens": 7}, {"top_p": 0.5}, {"seed": 4}, {"temperature": 0}, {"stop": ["q"]},
    {"ignore_eos": None}, {"logit_bias": {"5": 1}}, {"presence_penalty": 1},
    {"before": []}, {"before": [{"role": "system", "content": "be long"}]},
    {"before": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"}]},
    {"ignore_eos": None, "response_format": {"type": "json_object"}},
    {"chat_template_kwargs": {"x": 1}}, {"add_generation_prompt": False},
]  # fmt: skip
ALIKE: list[dict[str, Any]] = [
    {"user": "somebody"}, {"model": NAME}, {"metadata": {"a": "b"}}, {"n": 1},
    {"max_completion_tokens": 6}, {"response_format": {"type": "text"}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "state"), [*((m, "miss") for m in DIFFERENT), *((m, "hit") for m in ALIKE)]
)
def test_only_the_last_text_may_differ(server, more, state):
    assert ask(server, chat(QUESTION))[0] == "miss"
    assert ask(server, chat(NEAR, **more))[0] == state


@pytest.mark.parametrize(
    "more", [{"temperature": 0.7}, {"n": 2}, {"logprobs": True}, {"logprobs": True, "seed": 1}]
)
def test_what_wants_its_own_draws_is_left_alone(server, more):
    for _ in range(2):
        assert ask(server, chat(QUESTION, **more))[0] == "bypass"
    assert len(server.service.loaded.cache.answers) == 0


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 0.7, "seed": 3}])
def test_what_would_be_drawn_again_is_kept(server, more):
    assert [ask(server, chat(QUESTION, **more))[0] for _ in range(2)] == ["miss", "hit"]


def test_prompts_that_are_no_one_text_are_left_alone(server):
    for prompt in ([1, 2, 3], [QUESTION, OTHER], [QUESTION], " "):
        assert ask(server, {"prompt": prompt}, "/v1/completions")[0] == "bypass"
    messages = [*chat(QUESTION)["messages"], {"role": "assistant", "content": "It is"}]
    assert ask(server, {"messages": messages, "max_tokens": 2})[0] == "bypass"


def test_cache_control_is_heeded(server):
    asked = {"cache-control": "no-store"}
    assert ask(server, chat(QUESTION), **asked)[0] == "bypass"
    _, old = ask(server, chat(QUESTION))
    state, new = ask(server, chat(QUESTION), **{"cache-control": "max-age=0, No-Cache"})
    assert state == "refresh" and len(server.service.loaded.cache.answers) == 1
    assert new["choices"] != old["choices"], "temperature 1: a draw of its own"
    assert ask(server, chat(QUESTION))[1]["choices"] == new["choices"]


def test_long_texts_are_found_as_themselves_alone(server, monkeypatch):
    monkeypatch.setattr("lowbit.runtime.server.answer_cache.MAX_LETTERS", len(NEAR))
    body = {"prompt": QUESTION, "max_tokens": 2}
    assert [ask(server, body, "/v1/completions")[0] for _ in range(2)] == ["miss", "hit"]
    assert ask(server, {**body, "prompt": NEAR}, "/v1/completions")[0] == "miss"


def test_what_was_left_or_ended_with_the_context_is_not_kept(server):
    answers = server.service.loaded.cache.answers
    endless = {"prompt": QUESTION, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=endless) as told:
        next(told.iter_lines())
    server.idle()
    assert len(answers) == 0
    cut = {"prompt": QUESTION, "max_tokens": 255, "ignore_eos": True}
    _, told = ask(server, cut, "/v1/completions")
    assert told["choices"][0]["finish_reason"] == "length" and len(answers) == 0


def test_a_lookup_takes_a_place(server):
    places = server.service.loaded.places
    ask(server, chat(QUESTION))
    with places.take(places.running + places.max_queue):
        assert server.post("/v1/chat/completions", chat(NEAR)).status_code == 503
        assert ask(server, chat(QUESTION))[0] == "hit", "the same text needs no vector"
    assert places.taken == 0


def test_a_client_that_goes_while_its_vector_is_made_leaves_nothing(server, monkeypatch):
    cache, begun = server.service.loaded.cache, threading.Event()

    class Slow:
        async def of(self, text: str, engine: Any) -> torch.Tensor:
            begun.set()
            await asyncio.sleep(600)
            raise AssertionError

    monkeypatch.setattr(cache, "vectors", Slow())
    with pytest.raises(httpx2.ReadTimeout):
        server.post(CHATS, chat(QUESTION), timeout=0.5)
    assert begun.is_set()
    server.idle()
    assert until(lambda: [r for r in server.requests() if r["outcome"] == "client_gone"])


def test_each_key_has_answers_of_its_own(folder):
    keys = ("first-key-of-two", "second-key-of-two")
    with served(folder, api_keys=keys, semantic_cache=0.9) as server:
        for key, state in zip((*keys, *keys), ("miss", "miss", "hit", "hit"), strict=True):
            assert ask(server, chat(QUESTION), authorization=f"Bearer {key}")[0] == state


def test_without_the_option_nothing_is_told_or_kept(folder):
    with served(folder) as server:
        told = server.post("/v1/chat/completions", chat(QUESTION))
        assert told.status_code == 200 and HEADER not in told.headers
        assert server.service.loaded.cache is None


def test_vectors_are_seen_from_the_centre_of_many_texts(folder):
    """A causal model's own all point the same way."""
    llm = LLM(folder, "cpu", "float32")
    tokens = [llm.tokenizer(text)["input_ids"] for text in CENTRE_TEXTS]
    raw = torch.stack([mean_pooled(llm.model, ids, llm.device) for ids in tokens])
    centre = OwnVectors(llm)._centre
    assert torch.allclose(centre, raw.mean(0))
    seen = torch.stack([centred(vector, centre) for vector in raw])
    assert torch.allclose(seen.norm(dim=1), torch.ones(len(raw)))
    apart = ~torch.eye(len(raw), dtype=torch.bool)
    assert (raw @ raw.T)[apart].mean() > 0.3 > (seen @ seen.T)[apart].mean().abs() * 3


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"semantic_cache": 0.0}, "semantic_cache must be above 0 and at most 1, got 0.0"),
        ({"semantic_cache": 1.5}, "at most 1, got 1.5"),
        ({"semantic_cache": float("nan")}, "at most 1, got nan"),
        ({"semantic_cache_model": "x"}, "say --semantic-cache"),
        ({"semantic_cache_entries": 0}, "semantic_cache_entries must be at least 1"),
        ({"semantic_cache_bytes": 0}, "semantic_cache_bytes must be at least 1"),
        ({"semantic_cache_ttl": 0.0}, "semantic_cache_ttl must be a number of seconds above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(more, told):
    with pytest.raises(UserError, match=told):
        ServerSettings("x", **more)


def test_without_its_package_a_sentence_model_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    settings = ServerSettings("x", semantic_cache=0.9, semantic_cache_model="some/model")
    with pytest.raises(UserError, match=r"pip install 'lowbit\[semantic\]'"):
        check_cache(settings, None)
    check_cache(ServerSettings("x", semantic_cache=0.9), 2)
    keyed = ServerSettings("x", semantic_cache=0.9, api_keys=("first-key-of-two",))
    with pytest.raises(UserError, match="replicas are not told whose key asks"):
        check_cache(keyed, 2)


def test_a_sentence_models_vectors_are_compared_where_one_is_named(folder, tmp_path):
    package = pytest.importorskip("sentence_transformers", reason="no sentence-transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "the", "capital", "of"]
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "australia", "sort", "numbers"]))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    package.SentenceTransformer(str(tmp_path / "bert"), device="cpu").save(str(tmp_path / "st"))
    with served(folder, semantic_cache=0.9, semantic_cache_model=str(tmp_path / "st")) as server:
        for text, state in ((QUESTION, "miss"), (NEAR, "hit"), (OTHER, "miss")):
            assert ask(server, chat(text))[0] == state
    with pytest.raises(UserError, match="cannot be loaded"):
        SentenceVectors(str(tmp_path / "nothing"), "cpu")
