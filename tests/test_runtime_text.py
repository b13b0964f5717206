"""Tokens to text piece by piece, and where stop strings cut it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.runtime.detokenizer import Detokenizer, TextStream
from transformers import AutoTokenizer

from .runtime_models import BOS, EOS, byte_tokenizer
from .sentencepiece_tokenizer import sentencepiece_tokenizer

BYTES = byte_tokenizer()
SPACED = sentencepiece_tokenizer()


def ids_of(text: str) -> list[int]:
    return BYTES(text)["input_ids"]


def pieces_of(tokenizer, ids: list[int], before: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, before)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 258), max_size=40))
def test_pieces_add_up_to_the_whole_decoding(ids):
    assert "".join(pieces_of(BYTES, ids)) == BYTES.decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=20))
def test_no_piece_breaks_a_character(text):
    pieces = pieces_of(BYTES, ids_of(text))
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


def test_special_tokens_are_left_out():
    assert "".join(pieces_of(BYTES, [BOS, *ids_of("a\N{EURO SIGN}"), EOS])) == "a\N{EURO SIGN}"


@settings(deadline=None, max_examples=200)
@given(before=st.text("ab \N{EURO SIGN}", max_size=12), text=st.text("ab \n\xe9", max_size=12))
@pytest.mark.parametrize("tokenizer", [BYTES, SPACED], ids=["byte level", "SentencePiece"])
def test_a_text_goes_on_where_its_prompt_ends(tokenizer, before, text):
    """The space that a token of the continuation begins with is there, as the prompt's is not."""
    whole, cut = tokenizer(before + text)["input_ids"], len(tokenizer(before)["input_ids"])
    prompt, new = whole[:cut], whole[cut:]
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, whole)]
    pieces = pieces_of(tokenizer, new, tuple(prompt))
    if not decoded[0].endswith("\N{REPLACEMENT CHARACTER}"):
        assert decoded[0] + "".join(pieces) == decoded[1]


@pytest.mark.parametrize("specials", [0, 1, 9, 100])
def test_special_tokens_at_a_prompts_end_do_not_hide_its_text(specials):
    before = (*SPACED("ab")["input_ids"], *[SPACED.eos_token_id] * specials)
    assert "".join(pieces_of(SPACED, SPACED("a b")["input_ids"], before)) == " a b"
    alone = (SPACED.bos_token_id,) * specials
    assert "".join(pieces_of(SPACED, SPACED("a b")["input_ids"], alone)) == "a b"


@pytest.mark.parametrize("tokenizer", [BYTES, SPACED], ids=["byte level", "SentencePiece"])
def test_what_a_prompt_leaves_unfinished_is_not_the_continuations(tokenizer):
    euro = [i for i in tokenizer("\N{EURO SIGN}")["input_ids"] if tokenizer.decode([i]) != ""][-3:]
    before, rest = tuple(tokenizer("ab")["input_ids"] + euro[:2]), tokenizer("b")["input_ids"]
    pieces = pieces_of(tokenizer, [euro[2], *rest], before)
    assert "".join(pieces).strip(" ") in (
        "\N{REPLACEMENT CHARACTER}b",
        "\N{REPLACEMENT CHARACTER} b",
    )
    literal = tokenizer("ab\N{REPLACEMENT CHARACTER}")["input_ids"]
    assert "".join(pieces_of(tokenizer, tokenizer("b")["input_ids"], tuple(literal))).strip() == "b"


def test_a_peek_is_what_a_push_would_give():
    text = tuple(SPACED("ab")["input_ids"])
    detokenizer = Detokenizer(SPACED, text)
    for token in SPACED("b ab\N{EURO SIGN}a")["input_ids"]:
        assert detokenizer.peek(token) == detokenizer.peek(token) == detokenizer.push(token)


def test_a_prompt_of_endless_unfinished_bytes_is_read_in_no_time():
    calls = []

    class Counting:
        def decode(self, ids, **options):
            calls.append(len(ids))
            return BYTES.decode(ids, **options)

    Detokenizer(Counting(), tuple([BYTES.convert_tokens_to_ids("\xe2")] * 100_000))
    assert len(calls) < 30 and max(calls) < 1000


@pytest.mark.parametrize(
    "text", ["Once upon  a time, there was  ", " two  spaces", "a\n b", "\N{EURO SIGN}9"]
)
def test_pieces_of_a_sentencepiece_tokenizer(text):
    data = os.environ.get("LOWBIT_TEST_DATA")
    if not data:
        pytest.skip("LOWBIT_TEST_DATA does not name the folder with the tiny trained model")
    tokenizer = AutoTokenizer.from_pretrained(Path(data) / "stories260k")
    ids = tokenizer(text)["input_ids"]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def streamed(text: str, stop: tuple[str, ...]) -> tuple[TextStream, list[str]]:
    """All of `text` pushed, until stopped; the pieces that new_text handed out."""
    stream, handed_out = TextStream(BYTES, stop), []
    for token_id in ids_of(text):
        stream.push(token_id)
        handed_out.append(stream.new_text())
        if stream.stopped:
            break
    stream.finish()
    handed_out.append(stream.new_text())
    return stream, handed_out


words = st.text("ab\N{EURO SIGN}", min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(text=st.text("ab\N{EURO SIGN}", max_size=30), stop=st.lists(words, max_size=3).map(tuple))
def test_stop_strings_cut_at_their_first_occurrence(text, stop):
    """The text ends before the stop string that was complete first, and none of it leaks."""
    stream, handed_out = streamed(text, stop)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stream.stopped == bool(ends)
    seen = text[: min(ends)] if ends else text
    expected = seen[: min(seen.find(s) for s in stop if s in seen)] if ends else text
    assert stream.text == expected
    assert "".join(handed_out) == expected


def test_what_may_become_a_stop_string_is_held_back():
    _, handed_out = streamed("one END, two ENDING", ("ENDING",))
    assert handed_out[4:8] == ["", "", "", "END,"]
    assert "".join(handed_out) == "one END, two "


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None, ())
    stream.push(5)
    stream.finish()
    assert stream.text == "" and stream.new_text() == ""
