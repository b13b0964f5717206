"""`quantize bench` on our engine: whole results, no numbers of wrong answers, memory, roofline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from lowbit.evals.bench import roofline, session
from lowbit.evals.bench.comparisons import COMPARISONS, Variant, variants_of
from lowbit.evals.bench.drive import Answer
from lowbit.evals.bench.load import ClosedLoop, Job, Lengths
from lowbit.evals.bench.memory import MemoryWatch, resident_bytes_of, resident_pages
from lowbit.evals.bench.plan import BenchPlan
from lowbit.evals.bench.roofline import Ceilings, Work, decode_phase, prefill_phase, work_of
from lowbit.evals.bench.targets import EngineTarget
from lowbit.evals.results import check_results, read_results
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.bench import COMPARED, bench
from lowbit.runtime import LLM
from lowbit.runtime.held import kv_bytes_per_token, matrices, weight_bytes
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from .runtime_models import FAMILIES, save_tiny

TOP = Ceilings(1e9, 1e10, "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", FAMILIES["llama"]())


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, "cpu", max_model_len=64, max_num_seqs=2)


def run(*arguments: object, code: int = 0) -> Any:
    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_two_ways_are_compared_and_explained(folder: Path, story: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    shown = run(folder, "--text", story, "--concurrency", 2, "--requests", 4, "--prompt", "8-12",
                "--output", 6, "--sweep", "2x16", "--compare", "batching", "--explain",
                "--repeats", 2, "--slo", "ttft=99s", "--report", file)  # fmt: skip
    found = read_results(file)["rows"][0]["bench"]
    assert found["options"] == {"static": {"batching": "static"}, "continuous": {}}
    for served in found["loads"]:
        assert served["check"] == {"requests": 4, "tokens": 24, "agreement": 1.0, "bar": 0.95,
                                   "failed": None}  # fmt: skip
        assert 0 < served["tpot"]["p50"]["median"] <= served["tpot"]["p99"]["high"]
        assert served["goodput"] == served["requests_per_second"], "all are within 99 s"
    assert [(r["variant"], r["against"]) for r in found["ratios"]] == [("continuous", "static")]
    assert [(c["variant"], c["batch"], c["context"]) for c in found["sweep"]] == [
        ("static", 2, 16), ("continuous", 2, 16)]  # fmt: skip
    assert [p["phase"] for p in found["roofline"]["phases"]] == ["prefill", "decode"]
    assert all(split["weights"] > 0 and split["kv"] > 0 for split in found["memory"].values())
    assert "| continuous over static | clients: 2 |" in shown.stdout
    assert f"wrote {file}: quantize report makes a page of it" in shown.stderr


class Garbled(EngineTarget):
    """Tokens that the model did not say."""

    async def run(self, job: Job, heard: Callable[[], None]) -> Answer:
        answer = await super().run(job, heard)
        return Answer(answer.tokens, tuple((t + 7) % 200 for t in answer.token_ids or ()))


def test_wrong_answers_have_no_numbers(
    folder: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "EngineTarget", Garbled)
    shown = run(folder, "--text", story, "--concurrency", 2, "--requests", 2, "--prompt", 8,
                "--output", 8, "--repeats", 1, "--json", code=1)  # fmt: skip
    found = json.loads(shown.stdout)
    check_results(found, "it")
    (served,) = found["rows"][0]["bench"]["loads"]
    assert served["check"]["agreement"] < 0.5 and served["output_tokens_per_second"] is None
    assert "no numbers of lowbit: " in shown.stderr


def test_every_comparison_is_of_options_that_exist(folder: Path) -> None:
    assert set(COMPARED) == set(COMPARISONS)
    for name in COMPARISONS:
        first, *others = variants_of(name)
        assert others and first.options not in [v.options for v in others]
        for variant in (first, *others):
            plan = BenchPlan((ClosedLoop(1),), prompt=Lengths(8, 8), output=Lengths(8, 8))
            made = session._load(folder, plan, variant, session.EngineOptions("cpu"))
            assert (made.max_model_len, made.engine) == (16, "paged")
    with pytest.raises(UserError, match="--compare is one of batching, prefix-cache"):
        variants_of("magic")
    plan = BenchPlan((ClosedLoop(1),), prompt=Lengths(8, 8), output=Lengths(8, 8))
    before_rope = Variant("int4", {"kv_cache_dtype": "int4"})
    with pytest.raises(UserError, match="paged engine, which stores no keys as before"):
        session._load(folder, plan, before_rope, session.EngineOptions("cpu"))


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    long = ["--prompt", "999999", "--output", "8"]
    for options, message in (
        (["--concurrency", "x"], "numbers with commas"),
        (["--concurrency", "1", *long], r"need 1000007 positions, and .*: lower --prompt or"),
        (["--sweep", "1x999999"], r"needs 1000031 positions \(32 are decoded\), and .* would do"),
        (["--concurrency", "x", "--compare", "kw"], "--compare is one of batching.*got 'kw'"),
        ([], "nothing to run"),
        (["--rate", "1", "--report", tmp_path / "r.txt"], "takes FILE.json"),
        (["--rate", "1", "--url", "http://x/v1", "--compare", "kv"], "leave --url out"),
    ):
        with pytest.raises(UserError, match=message):
            run(folder, *options)


def test_what_is_held_is_the_models(llm: LLM) -> None:
    parameters = list(llm.model.parameters())
    assert weight_bytes(llm) >= sum(p.nbytes for p in parameters)
    whole = AutoModelForCausalLM.from_config(llm.model.config)  # linears may be held by a kernel
    dense = sum(p.numel() for p in whole.parameters() if p.ndim > 1)
    assert sum(m.numbers for m in matrices(llm)) == dense, "the tied table is the head's matrix"
    config = llm.model.config
    heads = config.num_key_value_heads * config.head_dim
    assert kv_bytes_per_token(llm) == config.num_hidden_layers * 2 * heads * 4


def test_pools_that_share_a_memory_count_once() -> None:
    both = torch.zeros(64 << 10)
    halves = [both[: 32 << 10], both[32 << 10 :]]
    assert resident_bytes_of(halves, both.device) in (None, both.nbytes)


def test_pages_are_there_once_they_are_written_to() -> None:
    pages = torch.from_numpy(np.zeros(64 << 18, dtype=np.float32))  # calloc's, as a pool's are
    storage, nbytes = pages.untyped_storage(), pages.nbytes
    before = resident_pages(storage)
    if before is None:
        pytest.skip("this system does not tell")
    pages[: len(pages) // 2] = 1.0
    after = resident_pages(storage)
    assert before < nbytes // 8 and after is not None
    assert nbytes // 2 <= after < nbytes * 5 // 8


def test_activations_are_what_a_load_takes_beside(llm: LLM) -> None:
    watch = MemoryWatch(llm)
    taken = torch.ones(24 << 20)  # 96 MiB
    del taken
    split = watch.split()
    if split.activations is not None:
        assert split.activations >= 90 << 20
    assert split.weights == weight_bytes(llm) and split.process > split.weights


def test_phases_by_hand() -> None:
    work = Work(1000, 0, 1.0, 500.0, kv_bytes=10.0, attention=4.0)
    decode = decode_phase(work, batch=2, context=100, seconds=1e-5, top=TOP)
    assert decode.memory == pytest.approx((1000 + 2 * 100 * 10) / 1e9)
    assert decode.compute == pytest.approx(2 * (2 * 500 + 4 * 100) / 1e10)
    assert (decode.bound, decode.share) == ("memory", pytest.approx(3e-6 / 1e-5))
    assert (decode.weight_bytes_per_token, decode.kv_bytes_per_token) == (500, 1000)
    prefill = prefill_phase(work, batch=1, context=100, seconds=1e-4, top=TOP)
    assert prefill.compute == pytest.approx((2 * 500 * 100 + 4 * 100 * 101 / 2) / 1e10)
    assert prefill.bound == "compute" and prefill.weight_bytes_per_token == 10


def test_experts_are_read_as_far_as_tokens_take_them() -> None:
    work = Work(1000, experts_bytes=800, routed=0.25, weights=1.0, kv_bytes=0.0, attention=0.0)
    one, many = (decode_phase(work, batch, 1, 1.0, TOP) for batch in (1, 8))
    assert one.weight_bytes_per_token == 200 + 800 * 0.25
    assert many.weight_bytes_per_token == 1000 / 8, "all of them"


def test_the_work_is_the_models_and_ceilings_are_measured(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(llm)
    assert work.weights == sum(m.numbers for m in matrices(llm)) and work.routed == 1.0
    config = llm.model.config
    assert work.attention == 4.0 * config.num_hidden_layers * config.hidden_size
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "MATRIX", {"cpu": 64})
    top = roofline.measure_ceilings(torch.device("cpu"), torch.float32)
    assert top.bandwidth > 1e6 and top.matmul > 1e6 and top.dtype == "float32"
