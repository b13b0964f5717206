"""A server with OpenAI's interface, asked for the log-probabilities of a text that it is given.

`/v1/completions` with `echo` and `logprobs` answers a prompt with each of its tokens' own
log-probability and those of the likeliest in its place. The prompt goes out as token ids; the
likeliest come back by their text, or as "token_id:N" where a server is told to (vLLM's
--return-tokens-as-token-ids). Of several tokens with one text (with a space before it and without,
halves of a character) it is read as the one that the base holds likeliest.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from torch import Tensor

from ..kernels.errors import UserError
from .told import Told, told_of
from .windows import Window

TIMEOUT = 600.0  # seconds of one window
SHOWN = 300  # characters of a server's complaint
TOPS = (20, 5, 1)  # likeliest tokens that are asked for, until a server grants so many
BY_ID = "token_id:"
NEEDED = (
    "a server is measured by /v1/completions with echo and logprobs, which it does not offer; "
    "quantize bench --url measures its speed alone"
)


class UrlTeller:
    """A server at `url`, the part of its address before "/completions" (ending in /v1 mostly).

    model: its name there, None for the first. tokenizer: the model's own. UserError where nobody
    answers.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, tokenizer: Any) -> None:
        try:
            import httpx2
        except ImportError as e:
            raise UserError("eval --url needs httpx2: pip install 'lowbit[evals]'") from e
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._errors = (httpx2.HTTPError, httpx2.InvalidURL)
        self._http = httpx2.Client(headers=headers, timeout=TIMEOUT)
        self._tokenizer, self._top = tokenizer, TOPS[0]
        self.url, self.vocabulary = url.rstrip("/"), len(tokenizer)
        self.model = model or self._served()

    def told(self, window: Window, base: Tensor | None) -> Told:
        ids: list[int] = window.ids.tolist()
        found = self._logprobs(ids, base is not None)
        own, likeliest = found.get("token_logprobs"), found.get("top_logprobs")
        if not isinstance(own, list) or len(own) < len(ids):
            raise UserError(f"{self.url}: {NEEDED}")
        known: list[dict[int, float]] = []
        for position, follows in enumerate([*ids[1:], None]):
            told = {} if follows is None else {follows: float(own[position + 1])}
            others = likeliest[position + 1 :][:1] if base is not None and likeliest else []
            if base is not None and others:
                told |= self._by_id(others[0] or {}, told, base[position])
            known.append(told)
        return told_of(known)

    def _logprobs(self, ids: list[int], top: bool) -> dict[str, Any]:
        """The `logprobs` of the answer to a prompt; fewer are asked for where they are refused."""
        while True:
            body = {
                "model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0,
                "echo": True, "logprobs": self._top if top else 1,
            }  # fmt: skip
            status, said = self._ask("POST", "/completions", body)
            if status == 400 and top and self._top != TOPS[-1]:
                self._top = TOPS[TOPS.index(self._top) + 1]
                continue
            if status != 200:
                raise UserError(f"{self.url} answered {status}: {said[:SHOWN]}")
            try:
                return json.loads(said)["choices"][0]["logprobs"] or {}
            except (ValueError, LookupError, TypeError) as e:
                raise UserError(f"{self.url}: {NEEDED}") from e

    def _by_id(
        self, by_text: dict[str, float], follows: dict[int, float], base: Tensor
    ) -> dict[int, float]:
        """The likeliest tokens. follows: the text's next one, whose text may be among them; base:
        log-probabilities [V]."""
        found: dict[int, float] = {}
        own = {(self._tokenizer.decode([token]), value) for token, value in follows.items()}
        for text, value in by_text.items():
            number = text.removeprefix(BY_ID)
            if number != text and number.isdecimal():
                found[int(number)] = value
            elif (text, value) not in own and text in self._texts:
                tokens = [t for t in self._texts[text] if t < len(base)]
                token = max(tokens, key=lambda t: base[t].item(), default=None)
                if token is not None and token not in follows:
                    found[token] = value
        return found

    @cached_property
    def _texts(self) -> dict[str, list[int]]:
        """The tokens of each text."""
        found: dict[str, list[int]] = {}
        for token in range(self.vocabulary):
            found.setdefault(self._tokenizer.decode([token]), []).append(token)
        return found

    def _served(self) -> str:
        """The name of the first model that the server has."""
        status, said = self._ask("GET", "/models", None)
        try:
            return json.loads(said)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as e:
            raise UserError(
                f"{self.url}/models answered {status} and names no model; give --served-name"
            ) from e

    def _ask(self, method: str, path: str, body: Any) -> tuple[int, str]:
        try:
            reply = self._http.request(method, f"{self.url}{path}", json=body)
        except self._errors as e:
            raise UserError(f"no server answers at {self.url}{path}: {e}") from e
        return reply.status_code, reply.text
