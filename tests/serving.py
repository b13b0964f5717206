"""A server in a thread of this process, on a free port, and clients of it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from lowbit.runtime import LLM
from lowbit.runtime.server.logs import JsonLines
from lowbit.runtime.server.run import address_of, bind, make_server
from lowbit.runtime.server.service import Service
from lowbit.runtime.server.settings import ServerSettings

NAME = "tiny"


class Lines(logging.Handler):
    """The log, as objects."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.written: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.written.append(json.loads(self.format(record)))


@dataclass
class Served:
    """url: without a path. http: a client of it. log: what the server has written."""

    url: str
    http: httpx2.Client
    service: Service
    log: list[dict[str, Any]]
    server: Any

    def post(self, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **more)

    def complete(self, prompt: Any = "hi", **more: Any) -> Any:
        """The answer, which must be one."""
        answer = self.post("/v1/completions", {"prompt": prompt, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """Of a stream, which must end as one does."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(d) for d in data[:-1]]

    def idle(self, seconds: float = 30) -> None:
        """Wait until nothing runs; fails where something stays."""
        ready = self.service.loaded
        assert ready is not None
        until(lambda: not ready.engine._engine.has_work and not ready.places.taken, seconds)

    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == "request"]


def until(true: Callable[[], Any], seconds: float = 30) -> Any:
    """What `true` gives as soon as that is something."""
    end = time.monotonic() + seconds
    while not (told := true()):
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)
    return told


@contextmanager
def served(
    model: Path | Callable[[], LLM], *, ready: bool = True, **settings: Any
) -> Iterator[Served]:
    """ready: wait until it is."""
    load = model if callable(model) else lambda: LLM(model, "cpu", "float32")
    told = ServerSettings(**{"model_name": NAME, "port": 0, "drain_timeout": 5.0, **settings})
    listening = bind(told.host, told.port, told.client_timeout)
    service = Service(told, load)
    server = make_server(service)
    lines, logger = Lines(), logging.getLogger("lowbit.server")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    url = address_of(listening)
    thread.start()
    try:
        with httpx2.Client(base_url=url, timeout=60) as http:
            if ready:
                until(lambda: service.state != "loading", 60)
                assert service.state == "ready", service.failure
            yield Served(url, http, service, lines.written, server)
    finally:
        server.should_exit = True
        thread.join(30)
        service.close()
        logger.removeHandler(lines)
    assert not thread.is_alive()
