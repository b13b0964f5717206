"""Tokens of logprobs are the pieces of the text that they stand for, spaces and all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .runtime_models import FAMILIES, TEMPLATE, save_tiny
from .sentencepiece_tokenizer import sentencepiece_tokenizer
from .serving import Served, served

TOKENIZER = sentencepiece_tokenizer()
TOKENIZER.chat_template = TEMPLATE
IDS = TOKENIZER.get_vocab()
WORDS = [i for token, i in IDS.items() if not token.startswith("<")]
WORD, BYTE, EOS = IDS["\N{LOWER ONE EIGHTH BLOCK}ab"], IDS["<0xE2>"], IDS["</s>"]
ASKED = {"max_tokens": 12, "temperature": 1, "seed": 4, "ignore_eos": True, "logprobs": 3}
WORDS_ALONE = {"logit_bias": {str(i): 100 for i in WORDS}}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder: Path = save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"](), tokenizer=False)
    TOKENIZER.save_pretrained(folder)
    with served(folder) as running:
        yield running


def check(choice: dict[str, Any]) -> list[str]:
    """Its tokens, which must add up to its text and be there where they say."""
    told, text = choice["logprobs"], choice["text"]
    assert "".join(told["tokens"]) == text
    ends = [*told["text_offset"][1:], len(text)]
    spans = zip(told["text_offset"], ends, strict=True)
    assert [text[begin:end] for begin, end in spans] == told["tokens"]
    for token, top in zip(told["tokens"], told["top_logprobs"], strict=True):
        assert top is None or not token or any(token.strip() in name for name in top)
    return told["tokens"]


def test_the_space_between_prompt_and_completion_is_there(server):
    asked = {"max_tokens": 2, "temperature": 0, "logit_bias": {str(WORD): 100}}
    for prompt in ("ab", TOKENIZER("ab")["input_ids"]):
        assert server.complete(prompt, **asked)["choices"][0]["text"] == " ab ab"
    events = server.events("/v1/completions", {"prompt": "ab", **asked})
    assert "".join(e["choices"][0]["text"] for e in events) == " ab ab"
    chat = {"messages": [{"role": "user", "content": "a"}], **asked}
    answer = server.post("/v1/chat/completions", chat).json()
    assert answer["choices"][0]["message"]["content"] == " ab ab"


@pytest.mark.parametrize("more", [{}, WORDS_ALONE], ids=["bytes", "words"])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["ab a", " a\N{EURO SIGN}", "<s>ab</s> b", [1, WORD, 2, WORD]])
def test_tokens_add_up_to_the_text(server, prompt, echo, more):
    asked = {"prompt": prompt, "echo": echo, **ASKED, **more}
    (choice,) = server.complete(**asked)["choices"]
    tokens = check(choice)
    if echo:
        ids = TOKENIZER(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        given = prompt if isinstance(prompt, str) else "ab ab"
        assert choice["text"].startswith(given) and "".join(tokens[: len(ids)]) == given
    parts = [e["choices"][0] for e in server.events("/v1/completions", asked)]
    assert "".join(p["text"] for p in parts) == choice["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert sum((p["logprobs"][name] for p in parts), []) == choice["logprobs"][name]


@pytest.mark.parametrize("stop", ["b a", "b ab ", " "])
def test_tokens_end_where_a_stop_string_cut_the_text(server, stop):
    asked = {"prompt": "ab", **ASKED, **WORDS_ALONE, "stop": stop, "max_tokens": 60}
    (choice,) = server.complete(**asked)["choices"]
    assert choice["stop_reason"] == stop
    check(choice)
    parts = [e["choices"][0] for e in server.events("/v1/completions", asked)]
    tokens = sum((p["logprobs"]["tokens"] for p in parts), [])
    assert tokens == choice["logprobs"]["tokens"]
    for part in parts:
        assert "".join(part["logprobs"]["tokens"]) in choice["text"]


def test_what_is_not_in_the_text_is_empty_among_its_tokens_and_named_among_the_likeliest(server):
    asked = {"logprobs": 1, "max_tokens": 4, "temperature": 0}
    ends = server.complete("ab", **asked, stop_token_ids=[EOS], logit_bias={str(EOS): 100})
    assert check(ends["choices"][0]) == [""]
    assert "</s>" in ends["choices"][0]["logprobs"]["top_logprobs"][0]
    word = server.complete("ab", **asked, stop_token_ids=[WORD], logit_bias={str(WORD): 100})
    assert check(word["choices"][0]) == [""]
    half = server.complete("ab", **asked, logit_bias={str(BYTE): 100})
    assert check(half["choices"][0]) == ["", "", "", 4 * "\N{REPLACEMENT CHARACTER}"]


def test_the_bytes_of_a_chats_tokens_add_up_to_its_text(server):
    chat = {"messages": [{"role": "user", "content": "a"}], **ASKED, "logprobs": True}
    for more in ({}, WORDS_ALONE, {"logit_bias": {str(BYTE): 100}}):
        asked = {**chat, "top_logprobs": 2, **more}
        (choice,) = server.post("/v1/chat/completions", asked).json()["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == 12 and all(len(p["top_logprobs"]) == 2 for p in content)
        text = choice["message"]["content"].encode()
        assert bytes(sum((p["bytes"] for p in content), [])) == text
        parts = [c for e in server.events("/v1/chat/completions", asked) for c in e["choices"]]
        assert sum((p["logprobs"]["content"] for p in parts if p["logprobs"]), []) == content
