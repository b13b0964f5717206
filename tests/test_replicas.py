"""Several engines behind one address.

What needs no Ray is quick. The rest starts `quantize serve --replicas 2` and takes minutes:

    pytest -m slow tests/test_replicas.py
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lowbit.evals.replica_loss import Load, measure, replica_processes
from lowbit.evals.server_soak import Server
from lowbit.kernels.errors import UserError
from lowbit.runtime.server.metrics import ServerMetrics
from lowbit.runtime.server.replicas.asked import MAX_TEXT, Asked, prefix_text
from lowbit.runtime.server.replicas.cluster import (
    GIB,
    Machine,
    Share,
    check_address,
    check_ray,
    share_of,
)
from lowbit.runtime.server.replicas.metrics import merged

from .runtime_models import FAMILIES, save_tiny
from .serving import until

KEY = "a-key-of-the-tests"
FEW = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize(
    ("replicas", "machines", "gpus", "memory", "threads"),
    [
        (2, [Machine(2, 0, 8 * GIB)], 0, GIB, 1),
        (2, [Machine(9, 0, 8 * GIB)], 0, GIB, 4),
        (1, [Machine(16, 0, 8 * GIB)], 0, 0, 16),
        (3, [Machine(8, 0, 8 * GIB), Machine(4, 0, 8 * GIB)], 0, GIB, 4),
        (3, [Machine(8, 0, GIB), Machine(8, 0, 2 * GIB)], 0, GIB, 4),
        (2, [Machine(16, 1, GIB), Machine(4, 1, GIB)], 1, 0, 4),
    ],
)
def test_replicas_share_the_machines_alike(replicas, machines, gpus, memory, threads):
    assert share_of(replicas, machines, gpus, memory) == Share(threads, gpus, memory)


@pytest.mark.parametrize(
    ("replicas", "machine", "gpus", "memory", "room"),
    [
        (3, Machine(2, 0, 64 * GIB), 0, GIB, 2),
        (2, Machine(8, 0, 3 * GIB), 0, 2 * GIB, 1),
        (2, Machine(8, 1, 64 * GIB), 1, 0, 1),
    ],
)
def test_more_than_there_is_room_for_are_refused(replicas, machine, gpus, memory, room):
    with pytest.raises(UserError, match=rf"room for {room}: ask for fewer with --replicas"):
        share_of(replicas, [machine], gpus, memory)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--replicas", "0"), "--replicas must be at least 1, got 0"),
        (("--ray-address", "x:1"), "say how many with --replicas"),
        (("--replicas", "2", "--device", "cuda:1"), "give --device cuda"),
    ],
)
def test_options_that_cannot_be_are_refused(command, shallow, options, told):
    outcome = command("serve", shallow, *options)
    assert outcome.code == 2 and told in outcome.stderr


def test_an_address_at_which_nobody_answers_is_told_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1", "127.0.0.1:x"):
            with pytest.raises(UserError, match="ray start --head"):
                check_address(address)


def test_without_ray_the_remedy_is_told(monkeypatch):
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("ray"):
            raise ImportError("No module named 'ray'")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'lowbit\[ray\]'"):
        check_ray()


def test_prompts_that_begin_alike_have_texts_that_do():
    def text(**body: Any) -> str:
        return prefix_text(json.dumps(body).encode())

    system = {"role": "system", "content": "You are terse. " * 20}
    one, other = (
        text(messages=[system, {"role": "user", "content": asked}], model="x")
        for asked in ("Why?", "How?")
    )
    assert len(os.path.commonprefix([one, other])) > len(system["content"])
    assert text(prompt="abc") == "abc" and text(input="de") == "de"
    assert text(prompt=[1, 2, 3])[:4] == text(prompt=[1, 2, 4])[:4] == "[[1,"
    assert len(text(prompt="x" * 10**6)) == MAX_TEXT
    for body in (b"", b"{", b"[1]", b"{}", b'{"prompt": ""}', b'{"prompt": 3}', b"[" * 10**5):
        assert prefix_text(body)  # Ray's router divides by its length
    assert prefix_text(b"") != prefix_text(b"")


def test_keys_stay_at_the_front():
    scope = {
        "method": "POST", "path": "/v1/completions", "query_string": b"", "client": ("x", 1),
        "headers": [(b"authorization", b"Bearer secret"), (b"x-request-id", b"theirs"),
                    (b"traceparent", b"00-1")],
    }  # fmt: skip
    asked = Asked.of(scope, b"{}", "ours")
    assert asked.headers == [(b"traceparent", b"00-1"), (b"x-request-id", b"ours")]
    assert "secret" not in repr(asked) and asked.scope()["path"] == "/v1/completions"


def test_metrics_of_all_replicas_stand_in_one_text():
    from prometheus_client.parser import text_string_to_metric_families

    def told(path: str) -> str:
        metrics = ServerMetrics("m")
        metrics.answered(path, 200, 0.1)
        return metrics.text(None).decode()

    text = merged(told("/v1/models"), {"b": told("/tokenize"), "a": told("/tokenize")})
    families = {f.name: f for f in text_string_to_metric_families(text)}
    running = families["vllm:num_requests_running"].samples
    assert [s.labels for s in running] == [
        {"model_name": "m", "replica": "a"}, {"model_name": "m", "replica": "b"},
    ]  # fmt: skip
    (http,) = (s for s in families["lowbit:http_requests"].samples if s.name.endswith("_total"))
    assert http.labels == {"path": "/v1/models", "status": "200"}, "of the front alone"
    assert text.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'lowbit[ray]'")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two replicas need two cores")
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("log") / "serve.log"


@pytest.fixture(scope="module")
def server(model, log) -> Iterator[Server]:
    os.environ["LOWBIT_API_KEY"] = KEY
    try:
        made = Server.start(model, log, ["--replicas", "2", "--drain-timeout", "20"])
    finally:
        del os.environ["LOWBIT_API_KEY"]
    yield made
    if made.process.poll() is None:
        made.stop()


@pytest.fixture
def http(server) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=server.url, timeout=120, headers=headers) as client:
        yield client


def requests_in(log: Path) -> dict[str, dict[str, Any]]:
    """By id."""
    events = [json.loads(x) for x in log.read_text().splitlines() if x.startswith("{")]
    return {e["request_id"]: e for e in events if e["event"] == "request"}


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestTwoReplicas:
    def test_every_route_is_there(self, http, server, log):
        assert http.get("/health").json() == {"status": "ready"}
        assert http.get("/ready").json() == {"status": "ready", "replicas": 2}
        assert "<html" in http.get("/").text
        assert http.get("/v1/models").status_code == http.get("/version").status_code == 200
        assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]
        assert http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
        assert len(http.post("/v1/embeddings", json={"input": "a"}).json()["data"]) == 1
        whole = http.post(
            "/v1/completions", json={"prompt": "hi", **FEW}, headers={"x-request-id": "whole"}
        )
        assert whole.json()["usage"]["completion_tokens"] == 4
        assert whole.headers["x-request-id"] == "whole"
        line = until(lambda: requests_in(log).get("whole"))
        assert (line["outcome"], line["completion_tokens"], line["caller"]) == (
            "answered", 4, "key 1",
        )  # fmt: skip
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "hi", **FEW, "stream": True}
        ) as answer:
            data = [x[6:] for x in answer.iter_lines() if x]
        assert data[-1] == "[DONE]"
        text = "".join(json.loads(d)["choices"][0]["text"] for d in data[:-1])
        assert text == whole.json()["choices"][0]["text"]

    def test_errors_keys_and_metrics_are_as_without_replicas(self, http, server):
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        wrong = http.post("/v1/completions", json={"prompt": "x", "temperature": -1})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"
        assert http.get("/nothing").status_code == 404
        text = http.get("/metrics").text
        of_replicas = [x for x in text.splitlines() if x.startswith("vllm:num_requests_running{")]
        assert len(of_replicas) == 2 and all('replica="' in x for x in of_replicas)

    def test_equal_beginnings_go_to_one_replica(self, http, log):
        """Ray's router, asked for one request at a time: nothing else draws it away."""
        seen: dict[str, set[str]] = {}
        for name in ("tortoise", "hare", "fox"):
            for number in range(4):
                body = {"prompt": f"{name} " * 20 + str(number), **FEW}
                told = f"{name}-{number}"
                http.post("/v1/completions", json=body, headers={"x-request-id": told})
                line = until(lambda told=told: requests_in(log).get(told))
                seen.setdefault(name, set()).add(line["replica"])
                assert number == 0 or line["cached_tokens"] > 0
        assert [len(replicas) for replicas in seen.values()] == [1, 1, 1]
        assert len(set.union(*seen.values())) == 2, "both have a part of the work"

    def test_a_client_that_goes_frees_its_places(self, http, log):
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())

        def idle() -> bool:
            text = http.get("/metrics").text
            lines = [x for x in text.splitlines() if x.startswith("vllm:num_requests_running{")]
            return len(lines) == 2 and all(x.endswith(" 0.0") for x in lines)

        until(idle)

    def test_sigterm_finishes_what_runs_and_leaves_no_process(self, http, server):
        processes = replica_processes(server.process.pid)
        assert len(processes) == 2
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "temperature": 1}
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(4)]
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            told = [answer.result().json() for answer in answers]
        assert [t["usage"]["completion_tokens"] for t in told] == [200] * 4
        assert server.process.wait(60) == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_replica_loses_no_request_that_was_not_yet_streaming(model, tmp_path):
    told = measure(model, tmp_path / "log", Load(clients=24, seconds=24.0))
    assert not told["wrong"], told
    assert told["asked_again"] + told["requests"].get("stream broken off, told so", 0) > 0, told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_no_replica_can_load_ends_the_server(model, tmp_path, command):
    import shutil

    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    outcome = command("serve", broken, "--replicas", "1", "--port", "0")
    last = outcome.stderr.splitlines()[-1]
    assert outcome.code == 2 and last.startswith("quantize: the replicas cannot be started: ")
    assert "model.safetensors is truncated or damaged" in last


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_signal_ends_all_at_once(model, tmp_path):
    server = Server.start(model, tmp_path / "log", ["--replicas", "1"])
    (replica,) = replica_processes(server.process.pid)
    body = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "n": 8, "temperature": 1}
    with ThreadPoolExecutor(1) as pool, httpx2.Client(base_url=server.url, timeout=60) as http:
        asked = pool.submit(http.post, "/v1/completions", json=body)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in (tmp_path / "log").read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 143
        assert isinstance(asked.exception(), httpx2.HTTPError)
    until(lambda: not Path(f"/proc/{replica}").exists(), 60)
