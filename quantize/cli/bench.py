"""`quantize bench`: how fast a model is served, by a load that others can repeat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from .common import model_path, print_json, say, write_json
from .common_options import AsJson, Device, Dtype
from .eval_options import ApiKey, ServedName, check_report

if TYPE_CHECKING:
    from ...evals.bench.load import Arrivals

COMPARED = ("batching", "prefix-cache", "kv", "speculation")  # of evals/bench/comparisons.py


def bench(
    model: Annotated[
        str,
        typer.Argument(help="Model folder, GGUF file or Hub id; with --url, of the tokenizer."),
    ],
    url: Annotated[
        str | None,
        typer.Option(help="Send the load to an OpenAI-compatible server: http://HOST:PORT/v1."),
    ] = None,
    served_name: ServedName = None,
    api_key: ApiKey = None,
    concurrency: Annotated[
        str, typer.Option(help="Clients that ask again once answered: 1,4,16 are three loads.")
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Requests/s that come by themselves (Poisson): 0.5,2 are two loads.")
    ] = "",
    requests: Annotated[int, typer.Option(help="Of one load.")] = 32,
    prompt: Annotated[str, typer.Option(help="Tokens of a prompt: 512, or drawn: 256-1024.")] = (
        "512"
    ),
    output: Annotated[str, typer.Option(help="Tokens of an answer: 128, or drawn: 64-256.")] = (
        "128"
    ),
    lengths: Annotated[
        Path | None,
        typer.Option(help="Prompts and lengths from a file of conversations, as ShareGPT's."),
    ] = None,
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens that all prompts of a load begin with.")
    ] = 0,
    text: Annotated[
        str, typer.Option(help="What prompts are cut from: pydoc, wikitext, FILE or a Hub id.")
    ] = "pydoc",
    slo: Annotated[
        str | None,
        typer.Option(help="Also count requests within ttft=500ms,tpot=50ms,e2e=10s: goodput."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Prefill and decode of BATCHESxCONTEXTS: 1,4,16x128,1024.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help=f"Side by side, in paired runs: {', '.join(COMPARED)}.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="What bounds each phase of the sweep, by this machine."),
    ] = False,
    repeats: Annotated[int, typer.Option(help="Counted runs of each load, after one more.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests that run at once. [default: what the loads send]")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv: Annotated[
        str, typer.Option(help="Format of the KV cache, as of quantize generate.")
    ] = "auto",
    report: Annotated[
        Path | None, typer.Option(help="Write the results too: FILE.json, for quantize report.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency and throughput of serving, of our engine or of any server.

    Greedy, every answer to its last token. Numbers are medians of repeated runs with the lowest and
    the highest; a run whose answers are not the model's own has none. docs/evals.md has the rules.

    Example: quantize bench ./smollm2-w4 --concurrency 1,8 --prompt 128 --output 64 --slo ttft=500ms
    """
    from ...evals.bench.comparisons import variants_of
    from ...evals.bench.latency import SLO
    from ...evals.bench.load import Lengths
    from ...evals.bench.plan import BenchPlan, check_plan, parse_sweep

    variants = variants_of(compare)
    if url is not None and (compare or explain):
        raise UserError("--compare and --explain are of our engine: leave --url out")
    if report is not None:
        check_report(report, (".json",), model, lengths)
    plan = BenchPlan(
        _arrivals(concurrency, rate), requests, Lengths.parse(prompt), Lengths.parse(output),
        lengths, shared_prefix, None if slo is None else SLO.parse(slo),
        None if sweep is None else parse_sweep(sweep), repeats, seed,
    )  # fmt: skip
    check_plan(plan, explain)
    from ...evals.bench import session

    if url is None:
        options = session.EngineOptions(device, dtype, kv, max_num_seqs)
        results = session.bench_engines(
            model_path(model), plan, variants, options, text, explain, say
        )
    else:
        results = session.bench_url(url, served_name, api_key, model_path(model), plan, text, say)
    _tell(results, report, as_json)


def _tell(results: dict[str, Any], report: Path | None, as_json: bool) -> None:
    from ...evals.bench.session import failures
    from ...evals.report_markdown import markdown
    from ...evals.summary import summarize

    if report is not None:
        write_json(report, results)
        say(f"wrote {report}: quantize report makes a page of it")
    if as_json:
        print_json(results)
    else:
        name = results["rows"][0]["name"]
        typer.echo(markdown(summarize([("this run", results)]), f"Serving {name}"), nl=False)
    if failed := failures(results):
        for why in failed:
            say(f"no numbers of {why}")
        raise typer.Exit(1)


def _arrivals(concurrency: str, rate: str) -> tuple[Arrivals, ...]:
    """A load for each number."""
    from ...evals.bench.load import ClosedLoop, Poisson

    try:
        clients = [ClosedLoop(int(n)) for n in concurrency.split(",") if n.strip()]
        rates = [Poisson(float(n)) for n in rate.split(",") if n.strip()]
    except ValueError as e:
        raise UserError(
            f"--concurrency and --rate are numbers with commas between them, got "
            f"'{concurrency}' and '{rate}'"
        ) from e
    return (*clients, *rates)
