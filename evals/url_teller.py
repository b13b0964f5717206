"""A server with OpenAI's interface, asked for the log-probabilities of a text that it is given.

`/v1/completions` with `echo` and `logprobs` answers a prompt with each of its tokens' own
log-probability and those of the likeliest in its place. The prompt goes out as token ids; the
likeliest come back by their text, or as "token_id:N" where a server is told to (vLLM's
--return-tokens-as-token-ids). A text that several tokens have belongs to none of them: it counts
to the rest.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

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

    def told(self, window: Window, top: bool) -> Told:
        ids: list[int] = window.ids.tolist()
        found = self._logprobs(ids, top)
        own, likeliest = found.get("token_logprobs"), found.get("top_logprobs")
        if not isinstance(own, list) or len(own) < len(ids):
            raise UserError(f"{self.url}: {NEEDED}")
        known: list[dict[int, float]] = []
        for position in range(len(ids)):
            others = likeliest[position + 1 :][:1] if top and likeliest else []
            known.append(self._by_id(others[0] or {}) if others else {})
            if position + 1 < len(ids):
                known[-1][ids[position + 1]] = float(own[position + 1])
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

    def _by_id(self, by_text: dict[str, float]) -> dict[int, float]:
        found: dict[int, float] = {}
        for text, value in by_text.items():
            number = text.removeprefix(BY_ID)
            own = int(number) if number != text and number.isdecimal() else self._texts.get(text)
            if own is not None:
                found[own] = value
        return found

    @cached_property
    def _texts(self) -> dict[str, int]:
        """The token of each text that one token alone has."""
        found: dict[str, int] = {}
        several: set[str] = set()
        for token in range(self.vocabulary):
            text = self._tokenizer.decode([token])
            if text in found:
                several.add(text)
            found[text] = token
        return {text: token for text, token in found.items() if text not in several}

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
