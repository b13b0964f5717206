"""`quantize bench --url` against our own server: whole answers, times, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from lowbit.evals.bench.drive import drive
from lowbit.evals.bench.load import ClosedLoop, Job, Load
from lowbit.evals.bench.targets import UrlTarget
from lowbit.evals.results import check_results
from lowbit.quantize.cli.bench import bench
from typer.testing import CliRunner

from .runtime_models import FAMILIES, save_tiny
from .serving import NAME, Served, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", FAMILIES["llama"]())


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as running:
        yield running


def test_a_server_is_benched(server: Served, folder: Path, story: Path) -> None:
    app = typer.Typer()
    app.command()(bench)
    options = ["--url", f"{server.url}/v1", "--text", str(story), "--concurrency", "2",
               "--requests", "4", "--prompt", "8-12", "--output", "6", "--repeats", "1",
               "--json"]  # fmt: skip
    shown = CliRunner().invoke(app, [str(folder), *options])
    assert shown.exit_code == 0, shown.output
    results = json.loads(shown.stdout)
    check_results(results, "it")
    (row,) = results["rows"]
    assert (row["name"], row["size"]) == (NAME, None)
    (told,) = row["bench"]["loads"]
    assert told["check"]["requests"] == 4 and told["check"]["agreement"] is None
    ttft, tpot = (told[kind]["p50"]["median"] for kind in ("ttft", "tpot"))
    assert tpot > 0 and ttft > 0
    assert len(server.requests()) >= 4 + 4, "one load to warm up and one that counts"


def test_a_request_that_the_server_refuses_is_an_error_of_its_own(server: Served) -> None:
    jobs = (Job(tuple(range(5)), 3), Job((10**6,), 3))

    async def run() -> list[str | None]:
        async with UrlTarget(f"{server.url}/v1") as target:
            return [r.error for r in await drive(target, Load(jobs, ClosedLoop(1)))]

    good, bad = asyncio.run(run())
    assert good is None and bad is not None and "answered 400" in bad
