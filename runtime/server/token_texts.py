"""What each token of a text adds to it, for logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..detokenizer import Detokenizer
from ..sampling.logprobs import Logprob, TokenLogprobs


class Entry(NamedTuple):
    """name: `text`, or where that is empty, of a special token or a part of a character, how the
    token reads alone."""

    name: str
    text: str
    logprob: float


class TokenTexts:
    """Of one text, token by token: their sum is the text, special tokens left out. before: the ids
    that it follows. Without a tokenizer all are empty."""

    def __init__(self, tokenizer: Any | None, before: Sequence[int] = ()) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, before)

    def take(
        self, token: int, known: TokenLogprobs, last: bool = False
    ) -> tuple[str, dict[int, Entry]]:
        """What `token` adds, and what it and each of `known` were as the next one. last: what is
        unfinished after it stays so, and is added by it."""
        if self._detokenizer is None:
            return "", {t: Entry("", "", told.logprob) for t, told in known.items()}
        entries = {t: self._entry(self._detokenizer, t, told) for t, told in known.items()}
        text = self._detokenizer.push(token)
        if last:
            text += self._detokenizer.flush()
        if text and token in entries:
            entries[token] = entries[token]._replace(name=text, text=text)
        return text, entries

    @staticmethod
    def _entry(detokenizer: Detokenizer, token: int, told: Logprob) -> Entry:
        text = detokenizer.peek(token)
        return Entry(text or told.decoded_token or "", text, told.logprob)
