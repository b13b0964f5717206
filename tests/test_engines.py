"""Other engines than transformers': our runtime, llama.cpp, servers; and what they leave untold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import typer
from lowbit.calib.text import load_text, load_tokenizer
from lowbit.evals import engines, url_latency
from lowbit.evals.engines import Engine, engine_of, url_engine
from lowbit.evals.llamacpp import available
from lowbit.evals.measure import measure_models
from lowbit.evals.protocols import windowing_for
from lowbit.evals.report import Row
from lowbit.evals.results import check_results, read_results
from lowbit.evals.scorer import load_scorer
from lowbit.evals.summary import summarize
from lowbit.evals.tasks import Question, choice_scores
from lowbit.evals.told import RESOLVED, filled, predicted, told_of
from lowbit.evals.url_teller import TOPS, UrlTeller
from lowbit.evals.windows import Window, Windowing
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.eval import ENGINES, evaluate
from lowbit.quantize.gguf.as_folder import folder_of
from lowbit.quantize.gguf.export import export_gguf
from typer.testing import CliRunner

from .gguf_models import shared_data
from .runtime_models import quantize_folder
from .serving import Served, served

needs_llama_cpp = pytest.mark.skipif(not available(), reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def stories() -> Path:
    return shared_data() / "stories260k"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = (shared_data() / "text" / "tinystories_valid.txt").read_text(encoding="utf-8")
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(whole[:5000], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def server(stories: Path) -> Iterator[Served]:
    with served(stories) as running:
        yield running


def wider(stories: Path) -> Path:
    """The same model with an MLP of a width that groups divide."""
    return stories.with_name("stories260k-ffn192")


def rows(
    model: Path, base: Path, text: Path, engine: Engine | None, **more: Any
) -> tuple[Row, Row]:
    """The model by transformers and by the engine, on two windows, beside the base."""
    loaded, windows = load_text(str(text), "evaluation"), Windowing(64, 64, windows=2)

    def measured(chosen: dict[str, Engine], **options: Any) -> Row:
        report = measure_models({"base": base, "model": model}, loaded, windows, base="base",
                                engines=chosen, **options)  # fmt: skip
        return report.rows[1]

    assert engine is not None
    return measured({}, **more), measured({"model": engine})


def test_what_is_not_told_counts_as_one_token() -> None:
    base = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    model = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    told = [{7: model[0, 7].item(), 3: model[0, 3].item()}, {}, dict(enumerate(model[2].tolist()))]
    got = filled(told_of(told), base)
    assert got.exp().sum(-1) == pytest.approx([1.0] * 3, abs=1e-6)
    kept, p, q = [3, 7], base[0].double().exp(), model[0].double().exp()
    rest = [1 - float(x[kept].sum()) for x in (p, q)]
    want = float((p[kept] * (p[kept] / q[kept]).log()).sum()) + rest[0] * math.log(
        rest[0] / rest[1]
    )
    exact = float((p * (p / q).log()).sum())
    found = (base.double().exp() * (base - got).double()).sum(-1)
    assert float(found[0]) == pytest.approx(want, abs=1e-6) and 0 < want < exact
    assert torch.equal(got[1], base[1]), "of this position nothing was asked"
    assert torch.allclose(got[2], model[2], atol=1e-6), "of this one all is known"


def test_a_rest_below_what_engines_resolve_is_the_bases_own() -> None:
    tail = 1e-5
    base = torch.tensor([[1 - tail, tail * 0.75, tail * 0.25]]).log()
    over = told_of([{0: 1e-6}])  # a probability that rounding has brought above 1
    assert filled(over, base)[0, 1:].tolist() == pytest.approx(base[0, 1:].tolist(), abs=1e-4)
    sure = told_of([{0: math.log(1 - 1e-9)}])
    wide = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert filled(sure, wide)[0, 1:].exp().sum().item() == pytest.approx(RESOLVED, rel=1e-3)
    none = told_of([{0: -1e30, 1: 0.0}])  # what stands for a probability of nothing
    assert filled(none, wide).isfinite().all()


def test_our_runtime_gives_what_transformers_does(
    stories: Path, text: Path, tmp_path: Path
) -> None:
    model = quantize_folder(wider(stories), tmp_path / "w4", "W4A16", 32)
    theirs, ours = rows(model, stories, text, engine_of("lowbit"), dtype="float32")
    assert ours.perplexity.nll == pytest.approx(theirs.perplexity.nll, rel=1e-4)
    assert ours.divergence is not None and theirs.divergence is not None
    assert ours.divergence.kld_mean == pytest.approx(theirs.divergence.kld_mean, rel=1e-2)
    assert ours.engine is not None and ours.engine.top is None and "runtime" in ours.engine.name


@needs_llama_cpp
@pytest.mark.parametrize("file_type", ["F16", "Q8_0"])
def test_llama_cpp_gives_what_its_rounding_does_here(
    stories: Path, text: Path, tmp_path: Path, file_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    export_gguf(stories, file, file_type, progress=False)
    folder = folder_of(file, lambda line: None, tmp_path)
    engine = engine_of("llama.cpp")
    here, there = rows(folder, stories, text, engine, inputs="llama.cpp")
    near = 1e-3 if file_type == "F16" else 5e-3  # its cache is in float16, which moves codes
    assert there.perplexity.perplexity == pytest.approx(here.perplexity.perplexity, rel=near)
    assert there.divergence is not None and here.divergence is not None
    assert there.divergence.kld_mean == pytest.approx(here.divergence.kld_mean, rel=0.15, abs=2e-5)
    assert there.divergence.top1 == pytest.approx(here.divergence.top1, abs=0.011)
    assert there.path == str(file) and there.size == here.size
    monkeypatch.setattr(engines, "LLAMA_CPP_TOP", 8)
    _, few = rows(folder, stories, text, engine)
    assert few.divergence is not None
    assert few.divergence.kld_mean <= there.divergence.kld_mean + 2e-5, "a lower bound"
    assert few.divergence.nll_difference == pytest.approx(
        there.divergence.nll_difference, abs=1e-5
    ), "the text's own tokens are always told"


@needs_llama_cpp
def test_the_protocol_of_llama_cpp_is_its_own_perplexity(stories: Path, text: Path) -> None:
    """Every token that llama-perplexity scores, predicted by llama.cpp from the F32 file."""
    gguf = stories / "stories260K-f32.gguf"
    tokenizer = load_tokenizer(stories)
    windowing = windowing_for("llama.cpp-512", [stories], tokenizer)
    loaded = load_text(str(text), "evaluation")
    folders = {"theirs": folder_of(gguf, lambda line: None), "ours": stories}
    engine = engine_of("llama.cpp")
    assert engine is not None
    report = measure_models(folders, loaded, windowing, engines={"theirs": engine})
    theirs, ours = (row.perplexity for row in report.rows)
    assert theirs.tokens == ours.tokens == 255 * theirs.windows > 500
    assert ours.perplexity == pytest.approx(theirs.perplexity, rel=1e-3)
    assert report.protocol.dtype == "its own"


@needs_llama_cpp
def test_llama_cpp_answers_questions(stories: Path, tmp_path: Path) -> None:
    question = Question("Once upon a", ("time there was", "qqq zzz"), 0)
    tokenizer, scorer = load_tokenizer(stories), load_scorer(stories)
    folder = folder_of(stories / "stories260K-f32.gguf", lambda line: None, tmp_path)
    engine = engine_of("llama.cpp")
    assert engine is not None
    wanted = engines.Loading(folder, "auto", torch.device("cpu"), "auto", 64)
    theirs = choice_scores(engine.load(wanted), question, tokenizer)
    assert theirs.tolist() == pytest.approx(
        choice_scores(scorer, question, tokenizer).tolist(), abs=5e-3
    )


def test_a_server_is_measured_by_its_logprobs(
    server: Served, stories: Path, text: Path, tmp_path: Path
) -> None:
    base = quantize_folder(wider(stories), tmp_path / "w4", "W4A16", 32)
    exact, told = rows(stories, base, text, url_engine(f"{server.url}/v1/", None, None))
    assert told.perplexity.nll == pytest.approx(exact.perplexity.nll, rel=1e-4)
    assert told.divergence is not None and exact.divergence is not None
    assert told.divergence.nll_difference == pytest.approx(
        exact.divergence.nll_difference, abs=1e-4
    )
    bound = told.divergence.kld_mean / exact.divergence.kld_mean
    assert 0.3 < bound <= 1.0001, "20 tokens hold much of it, and never more than all"
    same = told.divergence.top1 - exact.divergence.top1
    assert 0 <= same < 0.08, "of 512 tokens many read alike, and then count as the same"
    assert (told.size, told.linears) == (None, None) and told.path == f"{server.url}/v1/"


def test_the_command_measures_a_server_and_its_latency(
    server: Served, stories: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_latency, "REQUESTS", 1)
    file = tmp_path / "r.json"
    shown = run(stories, "--url", f"{server.url}/v1", "--base", stories, "--text", text, "--ctx",
                64, "--windows", 1, "--speed", "--report", file)  # fmt: skip
    results = read_results(file)
    check_results(results, file)
    base, row = results["rows"]
    assert row["engine"] == {"name": f"a server at {server.url}/v1", "top": TOPS[0]}
    assert row["divergence"]["kld_mean"] < 1e-3, "the model itself, but for texts of two tokens"
    assert row["size"] is None
    (load,) = row["bench"]["loads"]
    assert load["check"]["failed"] is None and load["ttft"]["p50"]["median"] > 0
    assert "latency, one client, 1 requests, prompts of 64" in shown.stdout
    assert "a lower bound" in shown.stdout and f"wrote {file}" in shown.stderr
    group = summarize([("r.json", results)])["groups"][0]
    assert group["rows"][1]["against_base"]["smaller"] is None


class Answers(BaseHTTPRequestHandler):
    """A server that knows no echo, or no more than five tokens."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012
    most = 5
    echo = True

    def do_GET(self) -> None:  # noqa: N802
        self.reply(200, {"data": [{"id": "it"}]})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["logprobs"] > self.most:
            return self.reply(400, {"error": f"logprobs is at most {self.most}"})
        told = None
        if self.echo:
            n = len(body["prompt"]) + 1
            told = {
                "token_logprobs": [None] + [-1.5] * (n - 1),
                "top_logprobs": [None] + [{"token_id:3": -0.5, "nobody's": -2.0}] * (n - 1),
            }
        self.reply(200, {"choices": [{"text": "", "logprobs": told}]})

    def reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answers, "asked", [])
    running = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}/v1"
    running.shutdown()
    thread.join()
    running.server_close()


def test_fewer_tokens_are_taken_where_more_are_refused(fake: str, stories: Path) -> None:
    teller = UrlTeller(fake, None, "secret", load_tokenizer(stories))
    assert teller.model == "it"
    base = torch.full((4, teller.vocabulary), -math.log(teller.vocabulary))
    told = teller.told(Window(torch.tensor([5, 6, 7, 8]), 0), base)
    assert [body["logprobs"] for body in Answers.asked] == [20, 5]
    assert Answers.asked[1]["prompt"] == [5, 6, 7, 8] and Answers.asked[1]["echo"] is True
    assert told.ids.tolist() == [[6, 3], [7, 3], [8, 3], [3, -1]]
    assert told.log_probs[0].tolist() == [-1.5, -0.5]
    window = Window(torch.tensor([5, 6, 7, 8]), 0)
    assert predicted(teller, window, base)[1, 7].item() == -1.5
    assert predicted(teller, window)[1, 7].item() == -1.5 and Answers.asked[-1]["logprobs"] == 1


def test_a_text_of_several_tokens_is_the_one_that_the_base_holds_likeliest(
    fake: str, stories: Path
) -> None:
    teller = UrlTeller(fake, "it", None, load_tokenizer(stories))
    text, tokens = next((t, ids) for t, ids in teller._texts.items() if len(ids) == 2 and t.strip())
    base = torch.full((teller.vocabulary,), -9.0)
    for likely, other in (tokens, tokens[::-1]):
        base[likely], base[other] = -1.0, -5.0
        assert teller._by_id({text: -0.5}, {}, base) == {likely: -0.5}
        assert teller._by_id({text: -0.5}, {other: -0.5}, base) == {}, "the text's own, told twice"
        assert teller._by_id({text: -0.5}, {other: -2.0}, base) == {likely: -0.5}


def test_a_server_without_logprobs_is_refused_with_what_is_left(
    fake: str, stories: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--url", fake, "--text", text, "--ctx", 64, "--windows", 1]
    monkeypatch.setattr(Answers, "most", 0)
    with pytest.raises(UserError, match="answered 400: .*logprobs is at most 0"):
        run(stories, *options)
    monkeypatch.setattr(Answers, "most", 20)
    monkeypatch.setattr(Answers, "echo", False)
    with pytest.raises(UserError, match="quantize bench --url measures its speed alone"):
        run(stories, *options)
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1:9/v1/models"):
        run(stories, "--url", "http://127.0.0.1:9/v1", *options[2:])


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(evaluate)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "lamma.cpp"], r"unknown engine 'lamma.cpp'; did you mean 'llama.cpp'"),
        (["--engine", "lowbit", "--url", "http://x/v1"], "are two engines"),
        (["--engine", "lowbit", "--inputs", "llama.cpp"], "--inputs is of what lowbit computes"),
        (["--engine", "lowbit", "--kv", "int8"], "--kv int8 is measured by transformers'"),
        (["--url", "http://x/v1", "--generate", "2"], "--generate is of what lowbit computes"),
    ],
)
def test_mistakes_are_named(stories: Path, text: Path, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(stories, "--text", text, "--ctx", 64, "--windows", 1, *options)


@needs_llama_cpp
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "llama.cpp runs GGUF files, and .*stories260k is none"),
        (["--speed"], "--speed is of what lowbit computes itself, not llama.cpp"),
        (["--kv", "int8"], "with its own cache: no --kv"),
    ],
)
def test_what_llama_cpp_does_not_do_is_named(
    stories: Path, text: Path, options: list[str], message: str
) -> None:
    model = stories if not options else stories / "stories260K-f32.gguf"
    with pytest.raises(UserError, match=message):
        run(model, "--engine", "llama.cpp", "--text", text, "--ctx", 64, "--windows", 1, *options)


def test_the_commands_names_are_the_librarys() -> None:
    assert tuple(engines.ENGINES) == ENGINES


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "available", lambda: False)
    with pytest.raises(UserError, match="pip install xllamacpp"):
        engine_of("llama.cpp")
