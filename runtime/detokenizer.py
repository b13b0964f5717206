"""Token ids to text as they come, and the search for stop strings in it.

Decoding each token alone breaks characters that several byte tokens make up, and loses the spaces
that some tokenizers only write between tokens. So the tokens since the last complete character are
decoded together with the run before them, and the text of that run is taken off the front. The
first run is the end of what the text follows, its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for an unfinished character
_REACHES = (8, 64, 512)  # tokens to look back for some text
_UNFINISHED = 3  # byte tokens at most of a part of a character


class Detokenizer:
    """`push` returns the text that a token completes, `flush` what is left unfinished.

    The pieces add up to what the tokenizer's decoding of all ids without special tokens has after
    that of `before`. A character that `before` leaves unfinished stays so.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._prefix = 0  # ids before this one are forgotten
        self._ids = self._end_of(before)
        self._read = len(self._ids)  # ids before this one have been returned as text
        self._known = self._decode(self._ids) if self._ids else ""  # of ids[prefix:read]

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        window = self._window()
        return self._take(window) if self._is_complete(window) else ""

    def peek(self, token_id: int) -> str:
        """What `push` of it would return."""
        window = self._decode([*self._ids[self._prefix :], token_id])
        return window[len(self._known) :] if self._is_complete(window) else ""

    def flush(self) -> str:
        return self._take(self._window())

    def _take(self, window: str) -> str:
        piece = window[len(self._known) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._known = self._window()
        return piece

    def _is_complete(self, window: str) -> bool:
        return len(window) > len(self._known) and not window.endswith(REPLACEMENT)

    def _window(self) -> str:
        return self._decode(self._ids[self._prefix :])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _end_of(self, before: Sequence[int]) -> list[int]:
        """So much of its end that there is text in it: special tokens alone tell nothing."""
        run: list[int] = []
        for reach in _REACHES:
            run = self._whole_characters(list(before[-reach:]))
            if reach >= len(before) or (run and self._decode(run)):
                break
        return run

    def _whole_characters(self, run: list[int]) -> list[int]:
        """Without the bytes of a character that is cut off at its beginning or unfinished at its
        end; with those of replacement characters that the text itself ends with."""
        cuts = range(min(_UNFINISHED, len(run)) + 1)
        for end in cuts:
            for begin in cuts:
                part = run[begin : len(run) - end]
                text = self._decode(part)
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return part
        parts = (run[begin:] for begin in cuts)
        return next((p for p in parts if not self._decode(p).startswith(REPLACEMENT)), run)


def text_after(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of `token_ids`, which follow `before`, without special tokens."""
    detokenizer = Detokenizer(tokenizer, before)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join(pieces) + detokenizer.flush()


class TextStream:
    """The text of one continuation: ends at the first stop string, hands out what is certain.

    `text` is what was kept so far; `stopped_by` the stop string that was met, which is cut off,
    unless include_stop. `new_text()` returns what is new since the last call and can no longer turn
    out to be the beginning of a stop string. before: the ids that it continues. Without a tokenizer
    the text stays empty.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stop: tuple[str, ...],
        include_stop: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, before)
        self._stop, self._include_stop = stop, include_stop
        self._handed_out = 0
        self._search_from = 0
        self._finished = False
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, token_id: int, search: bool = True) -> None:
        """search: a stop string in the text of this token, or in part, ends the text."""
        if self._detokenizer is not None:
            self._extend(self._detokenizer.push(token_id), search)

    def finish(self) -> None:
        """No more tokens come: unfinished characters are written as they are."""
        if self._finished:
            return
        if self._detokenizer is not None and not self.stopped:
            self._extend(self._detokenizer.flush(), True)
        self._finished = True

    def new_text(self) -> str:
        certain = len(self.text)
        if not self._finished and not self.stopped:
            certain -= self._possible_stop_length()
        start, self._handed_out = self._handed_out, max(self._handed_out, certain)
        return self.text[start : self._handed_out]

    def _extend(self, piece: str, search: bool) -> None:
        searched = len(self.text)
        self.text += piece
        if not search:
            self._search_from = len(self.text)
            return
        found = []
        for stop in self._stop:
            at = self.text.find(stop, max(self._search_from, searched - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) * self._include_stop]
            self.stopped_by = stop

    def _possible_stop_length(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(self.text) - self._search_from), 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self._stop):
                return n
        return 0
