"""Whether one text may ask what another does, as far as their words tell.

Vectors of whole texts tell least where a question's only word of weight is another one: "the
capital of Austria" is nearer to "the capital of Australia" than any paraphrase of it. Such pairs
have a form that needs no language to be known: one is the other with words replaced where they
stand, or in another order, or with other numbers or signs. They are held to be different questions,
which costs a few paraphrases (`fast` for `quick`) and misspellings: an answer is then computed.
"""

from __future__ import annotations

import re
from collections import Counter
from difflib import SequenceMatcher

MAX_LETTERS = 400  # of texts that are near; in longer ones what decides is too small a part

_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_SIGNS = r"\#$%&*+/<=>@\[\]\\^`{|}~¢£¤¥¦§©®°±×÷\u20a0-\u20cf\u2190-\u22ff"
_QUIET = r".,;:!?'\"()¿¡…–—“”‘’«»„‚、。，？！「」।॥؟،؛\-"
_IN_WORDS = rf"[^\s{_SIGNS}{_QUIET}{_UNSPACED}]"
_WORD = re.compile(
    rf"""(?P<number>\d+(?:[.,]\d+)*)
    |(?P<word>[{_UNSPACED}]|(?!\d){_IN_WORDS}+)
    |(?P<sign>-(?=\s*\d)|[{_SIGNS}])""",
    re.VERBOSE,
)


def asks_another(one: str, other: str) -> bool:
    """Their words, in lower case and without punctuation, say that they ask different things."""
    first, second = _Words(one), _Words(other)
    if first.exact != second.exact:
        return True
    if first.all == second.all:
        return False
    if Counter(first.all) == Counter(second.all):
        return True
    changes = SequenceMatcher(None, first.all, second.all, autojunk=False).get_opcodes()
    return all(what in ("equal", "replace") for what, *_ in changes)


class _Words:
    """all: in their order. exact: numbers and signs, which no paraphrase changes."""

    def __init__(self, text: str) -> None:
        found = list(_WORD.finditer(text.casefold()))
        self.all = [match.group() for match in found]
        self.exact = Counter(match.group() for match in found if match.lastgroup != "word")
