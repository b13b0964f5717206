"""What the server refuses, and to whom: keys, rates, sizes, queues, slow clients, and its end."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM
from lowbit.runtime.server.keys import ApiKeys, read_api_keys
from lowbit.runtime.server.limits import MAX_CALLERS, RateLimiter
from lowbit.runtime.server.run import bind
from lowbit.runtime.server.settings import ServerSettings

from .runtime_models import FAMILIES, save_tiny
from .serving import served, until

ENDLESS = {"prompt": "x", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


def test_keys_are_asked_for_and_never_logged(folder):
    keys = ("first-key-of-two", "second-key-of-two")
    with served(folder, api_keys=keys) as server:
        for header in (
            "",
            "Bearer wrong-key-wrong",
            f"Basic {keys[0]}",
            "Bearer",
            f"Bearer {keys}",
        ):
            answer = server.http.get("/v1/models", headers={"authorization": header})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/metrics", "/version", "/openapi.json"):
            assert server.http.get(path).status_code == 401
        assert (
            server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
        )
        for number, key in enumerate(keys, 1):
            answer = server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            until(lambda n=number: [r["caller"] for r in server.requests()][-1] == f"key {n}")
        told = json.dumps(server.log)
        assert "first-key" not in told and "second-key" not in told


def test_keys_come_from_a_file_and_a_variable(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-number-one\n\n  key-number-two  \nkey-number-one\n")
    monkeypatch.setenv("LOWBIT_API_KEY", "from-the-variable")
    given = read_api_keys(file)
    assert given == ("key-number-one", "key-number-two", "from-the-variable")
    keys = ApiKeys(given)
    assert [keys.number(k) for k in (*given, "other", "")] == [1, 2, 3, None, None]
    file.write_text("# ours\n\nshort\n")
    with pytest.raises(UserError, match="line 3 of .*keys cannot be an API key") as refused:
        read_api_keys(file)
    assert "short" not in str(refused.value)
    file.write_text("# none\n")
    with pytest.raises(UserError, match="holds no API key"):
        read_api_keys(file)


def test_a_bucket_fills_steadily_and_callers_do_not_share_it():
    now = 0.0
    limiter = RateLimiter(60, lambda: now)
    assert [limiter.ask("a") for _ in range(61)] == [0.0] * 60 + [1.0]
    assert limiter.ask("b") == 0
    now = 0.5
    assert limiter.ask("a") == pytest.approx(0.5)
    now = 1.5
    assert limiter.ask("a") == 0 and limiter.ask("a") > 0
    for number in range(MAX_CALLERS + 5):
        limiter.ask(str(number))
    assert len(limiter._buckets) == MAX_CALLERS


def test_past_the_rate_there_is_429_with_when_to_come_back(folder):
    with served(folder, rate_limit=2) as server:
        codes = [server.http.get("/v1/models").status_code for _ in range(3)]
        answer = server.http.get("/v1/models")
        assert codes == [200, 200, 429] and 25 <= int(answer.headers["retry-after"]) <= 31
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (
            server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200
        )


def test_sizes_are_limited(folder):
    with served(folder, max_body_bytes=2000, max_prompt_tokens=20, max_output_tokens=8) as server:
        large = server.post("/v1/completions", {"prompt": "x" * 2000})
        assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
        chunked = server.http.post("/v1/completions", content=(b"x" * 999 for _ in range(9)))
        assert chunked.status_code == 413
        long = server.post("/v1/completions", {"prompt": "x" * 21})
        assert long.status_code == 422 and long.json()["error"]["code"] == "prompt_too_long"
        assert server.post("/v1/completions", {"prompt": "x" * 20}).status_code == 200
        more = server.post("/v1/completions", {"prompt": "x", "max_tokens": 9})
        assert more.status_code == 422 and more.json()["error"]["code"] == "output_too_long"
        chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        told = server.post("/v1/chat/completions", chat).json()
        assert told["usage"]["completion_tokens"] == 8


def test_a_full_queue_and_a_long_wait_are_503(folder):
    def load() -> LLM:
        return LLM(folder, "cpu", "float32", max_num_seqs=1)

    with served(load, max_queue=1, queue_timeout=0.05) as server, ThreadPoolExecutor(2) as pool:
        places = server.service.loaded.places
        running = pool.submit(server.post, "/v1/completions", ENDLESS)
        until(lambda: server.service.loaded.engine._engine.metrics().running)
        waiting = pool.submit(server.post, "/v1/completions", ENDLESS)
        until(lambda: places.taken == 2)
        full = server.post("/v1/completions", ENDLESS)
        assert full.status_code == 503 and full.json()["error"]["code"] == "queue_full"
        assert int(full.headers["retry-after"]) >= 1
        late = waiting.result()
        assert late.status_code == 503 and late.json()["error"]["code"] == "queue_timeout"
        assert running.result().status_code == 200
        server.idle()


def test_what_can_never_fit_is_not_told_to_come_again(folder):
    """Nor is it counted: nothing of it has run."""

    def load() -> LLM:
        return LLM(folder, "cpu", "float32", max_num_seqs=4, max_model_len=64, kv_memory=1 << 16)

    with served(load, max_queue=2) as server:
        llm = server.service.loaded.engine.llm
        assert llm._engine._scheduler.config.kinds[0].num_blocks < 4 * 4
        few = {"prompt": "x", "max_tokens": 2, "temperature": 1}
        refused = [
            {**few, "prompt": ["x"] * 7},
            {**few, "prompt": ["x", "y"], "n": 4},
            {**few, "n": 5},
            {**few, "n": 4, "max_tokens": 60},
        ]
        for body in refused:
            for stream in (False, True):
                answer = server.post("/v1/completions", {**body, "stream": stream})
                assert answer.status_code == 422, answer.text
                assert "retry-after" not in answer.headers
                assert answer.json()["error"]["code"] in ("too_many_continuations", "never_fits")
        chat = {"messages": [{"role": "user", "content": "x"}], "n": 4, "max_tokens": 50}
        assert server.post("/v1/chat/completions", chat).status_code == 422
        server.idle()
        told = server.http.get("/metrics").text
        assert "request_success_total{" not in told and "prompt_tokens_count{" not in told.replace(
            'prompt_tokens_count{model_name="tiny"} 0.0', ""
        )
        lines = until(lambda: [r for r in server.requests() if r["path"] == "/v1/completions"][7:])
        assert "finish_reasons" not in lines[0]


def test_a_body_that_does_not_come_and_a_reader_that_does_not_read_are_left(folder):
    with served(folder, client_timeout=1.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "content-length: 500\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(head.encode() + b"{")
            assert b" 408 " in slow.recv(1000)
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with stuck:
            stuck.connect((host, int(port)))
            large = {"prompt": "x" * 200, "echo": True, "logprobs": 20, "n": 8, "stream": True}
            body = json.dumps({**large, "max_tokens": 50, "ignore_eos": True})
            head = head.replace("500", str(len(body)))
            stuck.sendall(head.encode() + body.encode())
            line = until(lambda: [x for x in server.requests() if x.get("slow_client")])
            assert line[0]["outcome"] == "client_gone"
        server.idle()


@pytest.mark.parametrize("said", [b"", b"GET /ver", b"GET /version HTTP/1.1\r\nhost: x\r\n"])
@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_connection_without_a_whole_header_is_ended(folder, before, said):
    with served(lambda: LLM(folder, "cpu", "float32"), ready=False, client_timeout=1.0) as server:
        until(lambda: server.server.started)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as half:
            half.sendall(before)
            if before:
                assert b" 200 " in half.recv(1000)
            half.sendall(said)
            while half.recv(1000):  # what is left of the answer, then the server's end
                pass
        assert server.http.get("/version").status_code == 200


def test_while_it_loads_it_lives_and_is_not_ready(folder):
    loading = threading.Event()

    def load() -> LLM:
        loading.wait(30)
        return LLM(folder, "cpu", "float32")

    with served(load, ready=False) as server:
        try:
            until(lambda: server.server.started)
            assert server.http.get("/health").json() == {"status": "loading"}
            for answer in (server.http.get("/ready"), server.post("/v1/completions", ENDLESS)):
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
                assert "retry-after" in answer.headers
            assert server.http.get("/metrics").status_code == 200
        finally:
            loading.set()
        until(lambda: server.service.state == "ready", 60)
        assert server.http.get("/ready").status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    with served(tmp_path / "nothing", ready=False) as server:
        until(lambda: server.server.should_exit)
        assert isinstance(server.service.failure, UserError)
        line = next(x for x in server.log if x["level"] == "critical")
        assert line["event"] == "the model cannot be served" and "traceback" not in line


def test_the_engines_death_turns_health_red_and_ends_the_server(folder, monkeypatch):
    with served(folder) as server, ThreadPoolExecutor(3) as pool:
        engine = server.service.loaded.engine
        monkeypatch.setattr(server.server.config, "timeout_graceful_shutdown", 1)
        running = [pool.submit(server.post, "/v1/completions", ENDLESS) for _ in range(3)]
        until(lambda: engine._engine.metrics().running == 3)

        def burst() -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(engine._engine, "step", burst)
        for answer in running:
            assert answer.result().status_code == 503
            assert answer.result().json()["error"]["code"] == "engine_dead"
        until(lambda: server.server.should_exit)
        assert server.service.state == "dead"
        assert isinstance(server.service.failure, MemoryError)
        line = next(x for x in server.log if x["level"] == "critical")
        assert line["event"] == "the engine has died" and "no room" in line["traceback"]


def test_what_drains_finishes_and_takes_nothing_more(folder):
    with served(folder, drain_timeout=60.0) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, **ENDLESS)
        until(lambda: server.service.loaded.engine._engine.has_work)
        server.service.drain()
        refused = server.post("/v1/completions", ENDLESS)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert server.http.get("/ready").status_code == 503
        server.server.should_exit = True
        assert running.result()["usage"]["completion_tokens"] == 240


def test_what_does_not_end_in_time_is_told_so(folder):
    with served(folder, drain_timeout=1.0) as server, ThreadPoolExecutor(1) as pool:
        engine = server.service.loaded.engine
        running = pool.submit(server.post, "/v1/completions", ENDLESS)
        until(lambda: engine._engine.has_work)
        held = threading.Event()
        engine._send(lambda: held.wait(30) and None)  # the engine stands still
        server.server.should_exit = True
        answer = running.result()
        held.set()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shut_down"
        server.idle()


def test_settings_and_addresses_that_cannot_be_are_refused(folder):
    for bad in ({"max_queue": -1}, {"rate_limit": 0}, {"drain_timeout": 0.0}, {"port": 70000}):
        with pytest.raises(UserError, match=next(iter(bad))):
            ServerSettings("x", **bad)
    with bind("127.0.0.1", 0, 1) as taken:
        taken.listen()
        with pytest.raises(UserError, match="cannot listen at 127.0.0.1, port"):
            bind("127.0.0.1", taken.getsockname()[1], 1)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--kv-memory", "lots", "--kv-memory must be a size"),
        ("--kv", "eight", "unknown KV format 'eight'"),
        ("--dtype", "float7", "dtype must be auto or one of"),
        ("--device", "abacus", "device 'abacus' cannot be used"),
        ("--max-num-seqs", "0", "--max-num-seqs must be at least 1, got 0"),
        ("--max-num-batched-tokens", "15", "must be at least 16 as --max-num-seqs is"),
        ("--max-model-len", "257", "--max-model-len must be from 2 to the model's 256, got 257"),
        ("--tool-parser", "other", "tool_parser must be one of"),
        ("--speculate", "bogus", "--speculate takes ngram, lookahead or a smaller model"),
        ("--gpu-memory-utilization", "2", "gpu_memory_utilization must be above 0 and at most 1"),
        ("--gpu-memory-utilization", "0.9", "the model is on cpu: take kv_memory"),
        ("--port", "70000", "port must be from 0"),
        ("--scheduling-policy", "edf", "--scheduling-policy must be fcfs or priority, got 'edf'"),
        ("--semantic-cache", "95", "semantic_cache must be above 0 and at most 1, got 95"),
        ("--semantic-cache-memory", "lots", "--semantic-cache-memory must be a size"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anybody_is_listened_to(
    command, folder, option, value, told
):
    outcome = command("serve", folder, option, value)
    assert outcome.code == 2 and told in " ".join(outcome.stderr.split())
    assert "listening" not in outcome.stderr


ASKS_ITSELF = f"""
import json, os, signal, threading, time, urllib.request
from lowbit.runtime.paged_engine import PagedEngine
from lowbit.runtime.server import run

step, bound = PagedEngine.step, run.bind

def slow_step(engine):
    time.sleep(0.01)
    return step(engine)

def bind(*args):
    made = bound(*args)
    threading.Thread(target=ask, args=made.getsockname()[:2], daemon=True).start()
    return made

PagedEngine.step, run.bind = slow_step, bind

def get(path):
    with urllib.request.urlopen(url + path) as answer:
        return answer.read()

def is_ready():
    try:
        return bool(get("/ready"))
    except OSError:
        return False

def ask(host, port):
    global url
    url = f"http://{{host}}:{{port}}"
    while not is_ready():
        time.sleep(0.05)
    threading.Thread(target=complete, daemon=True).start()
    while b'running{{model_name="m"}} 1.0' not in get("/metrics"):
        time.sleep(0.005)
    act()

def complete():
    body = json.dumps(json.loads({json.dumps(json.dumps(ENDLESS))})).encode()
    asked = urllib.request.Request(
        url + "/v1/completions", body, {{"content-type": "application/json"}}
    )
    try:
        answer = urllib.request.urlopen(asked)
    except OSError:  # its traceback would stand amid the log's lines
        return
    print(json.load(answer)["usage"]["completion_tokens"], flush=True)
"""
TERMINATE = """
def act():
    os.kill(os.getpid(), signal.SIGTERM)
"""
TERMINATE_TWICE = f"""{TERMINATE}
    while is_ready():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)
"""
KILL_THE_ENGINE = """
def act():
    def burst(engine):
        raise MemoryError("no room")
    PagedEngine.step = burst
"""


@pytest.mark.parametrize(
    ("act", "code", "stdout", "last"),
    [
        (TERMINATE, 0, "240\n", {"ended"}),
        (TERMINATE_TWICE, 143, "", {"ended at once"}),
        (KILL_THE_ENGINE, 1, "", {"the engine has died", "request"}),
    ],
    ids=["a signal drains", "a second ends at once", "the engine's death ends it"],
)
def test_the_process_ends_as_it_should(command, folder, act, code, stdout, last):
    """A thread of the process asks for a completion and acts while that runs."""
    asked = ["serve", folder, "--port", "0", "--name", "m", "--dtype", "float32"]
    outcome = command(*asked, before=ASKS_ITSELF + act)
    lines = [json.loads(line) for line in outcome.stderr.splitlines() if line[:1] == "{"]
    assert (outcome.code, outcome.stdout) == (code, stdout), outcome.stderr
    told = {line["event"]: line for line in lines[-len(last) :]}
    assert told.keys() == last
    if act == KILL_THE_ENGINE:
        (death,) = (line for line in lines if line["level"] == "critical")
        assert death is told["the engine has died"] and "no room" in death["traceback"]
        assert told["request"]["status"] == 503
