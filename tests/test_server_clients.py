"""Programs of others against the server: schemathesis on its OpenAPI document, LangChain, curl.

Each skips where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .runtime_models import FAMILIES, save_tiny
from .serving import NAME, Served, served

EXAMPLES, SEED = 10, 1
SECONDS = 600


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder = save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())
    with served(folder, max_output_tokens=40) as running:
        yield running


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="no package schemathesis"
)
def test_nothing_that_the_openapi_document_allows_or_forbids_is_a_fault(server, tmp_path):
    """Bodies made of the document, and ones that it does not allow: no 5xx, and every answer of the
    form that the document says."""
    asked = [
        "run", f"{server.url}/openapi.json", "--mode", "all", "--max-examples", str(EXAMPLES),
        "--seed", str(SEED), "--phases", "examples,coverage,fuzzing", "--no-color",
        "--checks", "not_a_server_error,response_schema_conformance,content_type_conformance",
    ]  # fmt: skip
    told = subprocess.run(
        [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", *asked],
        capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout[-6000:] + told.stderr[-2000:]
    server.idle()
    assert len(server.requests()) > 100
    assert all(r["status"] < 500 for r in server.requests())


def test_langchain_asks_streams_and_reads_usage(server):
    langchain = pytest.importorskip("langchain_openai", reason="no package langchain-openai")
    chat = langchain.ChatOpenAI(
        model=NAME, base_url=f"{server.url}/v1", api_key="any", temperature=1, seed=0,
        max_completion_tokens=8, stream_usage=True, max_retries=0,
    )  # fmt: skip
    messages = [("system", "be brief"), ("human", "hi")]
    whole = chat.invoke(messages)
    pieces = list(chat.stream(messages))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert whole.usage_metadata["output_tokens"] <= 8
    assert (
        sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces)
        == (whole.usage_metadata["output_tokens"])
    )
    schema = {
        "title": "answer", "type": "object", "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"], "additionalProperties": False,
    }  # fmt: skip
    longer = chat.bind(max_completion_tokens=40)
    made = longer.bind(
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    )
    assert json.loads(str(made.invoke(messages).content))["a"] in ("x", "y")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no program curl")
def test_curl_gets_an_answer_and_a_stream(server):
    def ask(**more: object) -> str:
        body = json.dumps({"prompt": "x", "max_tokens": 3, "ignore_eos": True, **more})
        told = subprocess.run(
            ["curl", "-sS", "-N", f"{server.url}/v1/completions", "--json", body],
            capture_output=True, check=True, text=True, timeout=60,
        )  # fmt: skip
        return told.stdout

    assert json.loads(ask())["usage"]["completion_tokens"] == 3
    assert ask(stream=True).rstrip().endswith("data: [DONE]")
