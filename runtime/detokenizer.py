"""Token ids to text as they come, and the search for stop strings in it.

Decoding each token alone breaks characters that several byte tokens make up, and loses the spaces
that some tokenizers only write between tokens. So the tokens since the last complete character are
decoded together with the run before them, and the text of that run is taken off the front.
"""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for an unfinished character


class Detokenizer:
    """`push` returns the text that a token completes, `flush` what is left unfinished.

    The pieces add up to the tokenizer's decoding of all ids without special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0  # ids before this one are forgotten
        self._read = 0  # ids before this one have been returned as text
        self._known = ""  # the text of ids[prefix:read]

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        window = self._decode(self._prefix)
        if window.endswith(REPLACEMENT) or len(window) <= len(self._known):
            return ""
        return self._take(window)

    def flush(self) -> str:
        return self._take(self._decode(self._prefix))

    def _take(self, window: str) -> str:
        piece = window[len(self._known) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._known = self._decode(self._prefix)
        return piece

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)


class TextStream:
    """The text of one continuation: ends at the first stop string, hands out what is certain.

    `text` is what was kept so far; `stopped_by` the stop string that was met, which is cut off,
    unless include_stop. `new_text()` returns what is new since the last call and can no longer turn
    out to be the beginning of a stop string. Without a tokenizer the text stays empty.
    """

    def __init__(
        self, tokenizer: Any | None, stop: tuple[str, ...], include_stop: bool = False
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
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
