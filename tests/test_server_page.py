"""The page at /: one file, nothing from outside, and what its scripts read is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .runtime_models import FAMILIES, save_tiny
from .serving import Served, served

PAGE = Path(__file__).parents[1] / "runtime/server/page.html"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder = save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())
    with served(folder, api_keys=("a-key-of-a-page",)) as running:
        yield running


def test_the_page_is_open_to_all_and_may_load_nothing(server):
    answer = server.http.get("/")
    assert answer.status_code == 200 and answer.text == PAGE.read_text()
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "connect-src 'self'" in policy


def test_it_names_no_outside_resource():
    text = PAGE.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|\bsrc=", text)
    assert re.findall(r'<link[^>]*href="([^"]*)"', text) == ["data:,"]


def test_what_it_plots_is_in_the_metrics(server):
    key = {"authorization": "Bearer a-key-of-a-page"}
    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/completions", body, headers=key).status_code == 200
    server.idle()
    told = server.http.get("/metrics", headers=key).text
    script = PAGE.read_text()
    names = re.findall(r'"((?:generation|prefix|time_to|inter_token)_\w+)"', script)
    names += re.findall(r"now\.value\.(\w+)", script)
    assert len(names) == 8
    for name in names:
        assert re.search(rf"^vllm:{name}(_bucket)?{{", told, re.MULTILINE), name
    assert 'vllm:generation_tokens_total{model_name="tiny"} 4.0' in told


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to read the script with")
def test_its_script_is_javascript(tmp_path):
    script = re.search(r"<script>(.*)</script>", PAGE.read_text(), re.DOTALL)
    assert script
    file = tmp_path / "page.js"
    file.write_text(script[1])
    subprocess.run(["node", "--check", file], check=True, capture_output=True)
