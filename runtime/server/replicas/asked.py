"""What goes from the server's front to a replica: a request, and a text by which Ray's router
knows prompts that begin alike."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Scope

Headers = list[tuple[bytes, bytes]]
MAX_TEXT = 32_768  # letters of a prompt by which it is known


@dataclass(frozen=True)
class Asked:
    """An HTTP request whose body has come whole. prompt: the name under which Ray's router looks
    for what to match; never empty, for it divides by the length."""

    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes
    prompt: str

    @classmethod
    def of(cls, scope: Scope, body: bytes, request_id: str) -> Asked:
        """Without the API key: replicas ask for none."""
        kept: Iterable[tuple[bytes, bytes]] = (
            pair for pair in scope["headers"] if pair[0] not in (b"authorization", b"x-request-id")
        )
        headers = [*kept, (b"x-request-id", request_id.encode())]
        return cls(
            scope["method"], scope["path"], scope["query_string"], headers, scope.get("client"),
            body, prefix_text(body),
        )  # fmt: skip

    def scope(self) -> Scope:
        """As the application of a replica takes it."""
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
            "method": self.method, "scheme": "http", "path": self.path,
            "raw_path": self.path.encode(), "query_string": self.query, "root_path": "",
            "headers": self.headers, "client": self.client, "server": None, "state": {},
        }  # fmt: skip


def prefix_text(body: bytes) -> str:
    """Of a request's prompt, or of its tools and messages: equal beginnings of these are equal
    beginnings of the text. What has none gets a text of its own."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
        told = None
    if isinstance(told, dict):
        prompt = told.get("prompt") or told.get("input")
        if isinstance(prompt, str):
            return prompt[:MAX_TEXT]
        if prompt or told.get("messages"):
            parts = [prompt] if prompt else [told.get("tools"), told["messages"]]
            return json.dumps(parts, ensure_ascii=False)[:MAX_TEXT]
    return uuid.uuid4().hex
