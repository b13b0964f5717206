"""`quantize eval`: perplexity, and how far a model has moved from its base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from .common import model_path, say
from .common_options import AsJson, Device, ServedModel
from .eval_options import ApiKey, ServedName, check_report

if TYPE_CHECKING:
    from ...evals.engines import Engine
    from ...evals.generation import GenerationPlan

PAGE = ": quantize report makes a page of it"
WINDOWS = 10  # where neither a protocol nor their number is named
ENGINES = ("transformers", "lowbit", "llama.cpp")  # of evals/engines.py, slow to import as well
NAMED = ("hf-2048", "hf-stride", "llama.cpp-512")  # of evals/protocols.py, which is slow to import


def evaluate(
    model: ServedModel,
    base: Annotated[
        str | None, typer.Option(help="The model it was made from: adds the divergence from it.")
    ] = None,
    text: Annotated[
        str, typer.Option(help="wikitext, pydoc, auto, FILE.txt, FILE.jsonl or a Hub data set.")
    ] = "auto",
    protocol: Annotated[
        str | None,
        typer.Option(
            help=f"Windows by name, in place of the next five: {', '.join(NAMED)} (docs/evals.md)."
        ),
    ] = None,
    ctx: Annotated[
        int | None, typer.Option(help="Tokens of a window. [default: 2048, or the model's limit]")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows. [default: ctx, no overlap]")
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            help=f"At most so many windows; 0: all. [default: {WINDOWS}; all of a --protocol]"
        ),
    ] = None,
    skip: Annotated[
        int | None,
        typer.Option(
            help="Positions at each window's beginning that are context, not scored. [default: 0]"
        ),
    ] = None,
    bos: Annotated[
        str | None,
        typer.Option(
            help="BOS in place of the first token of: none, first, each window. [default: none]"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16, float16.")
    ] = "auto",
    device: Device = "auto",
    kv: Annotated[
        str,
        typer.Option(
            help="Format of the model's KV cache: int8, fp8_dynamic, int4, k4v2, int4_hadamard, ..."
            " (docs/methods.md), model: none, auto: as the checkpoint says."
        ),
    ] = "auto",
    inputs: Annotated[
        str,
        typer.Option(
            help="What a GGUF file's matrices read: exact; llama.cpp: rounded as it does on CPUs."
        ),
    ] = "exact",
    engine: Annotated[
        str,
        typer.Option(
            help=f"What computes MODEL: {', '.join(ENGINES)} (of a GGUF file, where xllamacpp is)."
        ),
    ] = ENGINES[0],
    url: Annotated[
        str | None,
        typer.Option(
            help="Or a server that has it and offers logprobs with echo: http://HOST:PORT/v1; MODEL"
            " is then the folder of its tokenizer."
        ),
    ] = None,
    served_name: ServedName = None,
    api_key: ApiKey = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Also multiple-choice questions: FILE.jsonl, or lm-eval's arc_easy,... (repeat)."
        ),
    ] = None,
    generate: Annotated[
        int,
        typer.Option(
            help="Also continue so many passages of the text: loops, and where it leaves the base."
        ),
    ] = 0,
    noise_floor: Annotated[
        bool,
        typer.Option("--noise-floor", help="Also the base in bfloat16 against itself."),
    ] = False,
    speed: Annotated[
        bool,
        typer.Option("--speed", help="Also time the runtime's decode, or a server, one request."),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write the report too: FILE.md or FILE.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's perplexity and, with --base, its KL divergence from the original.

    Every number comes with its protocol; docs/evals.md defines the words. With --kv and the same
    --base, what the cache's format costs alone.

    Another --engine, or a server by its --url, is measured by what it tells of each token.

    Example: quantize eval ./smollm2-w4 --base ./SmolLM2-135M-Instruct --text test.txt
    """
    from ...calib.text import load_text, load_tokenizer, tokenize
    from ...evals.lm_eval_tasks import tasks_of
    from ...evals.measure import measure_models
    from ...evals.protocols import chosen_windowing
    from ...evals.speed import PROMPT_TOKENS, SpeedPlan
    from ...evals.url_latency import measure_latency

    if report is not None:
        check_report(report, (".md", ".json"), model, base)
    computing = _engine(engine, url, served_name, api_key)
    if computing is not None:
        timed = speed and url is None
        _check_beside(computing, generate=generate, speed=timed, inputs=inputs != "exact")
    asked = [task for name in tasks or () for task in tasks_of(name)]
    models = {"base": model_path(base)} if base is not None else {}
    models["model"] = model_path(model)
    folders = list(models.values())
    tokenizer = load_tokenizer(folders[0])
    if windows is not None and windows < 0:
        raise UserError(f"--windows must be 0 (all) or more, got {windows}")
    if windows is None and protocol is None:
        windows = WINDOWS
    asked_for = {"ctx": ctx, "stride": stride, "bos": bos, "skip": skip}
    given = {name: value for name, value in asked_for.items() if value is not None}
    windowing = chosen_windowing(protocol, folders, tokenizer, windows or None, given)
    loaded = load_text(text, "evaluation", tokenizer)
    say(f"text: {loaded.description}")
    prompt = tokenize(loaded.text, tokenizer, PROMPT_TOKENS).tolist()
    result = measure_models(
        models,
        loaded,
        windowing,
        base="base" if base is not None else None,
        dtype=dtype,
        device=device,
        speed=SpeedPlan(prompt) if speed and url is None else None,
        kv=kv,
        protocol=protocol,
        noise_floor=noise_floor,
        tasks=asked,
        generation=_generation(generate, loaded.text, tokenizer) if generate else None,
        inputs=inputs,
        engines={} if computing is None else {"model": computing},
        say=say,
    )
    if speed and url is not None:
        served = measure_latency(url, served_name, api_key, models["model"], text, say)
        result.rows[-1] = result.rows[-1]._replace(bench=served)
    if report is not None:
        written = result.to_json() if report.suffix == ".json" else result.to_markdown()
        report.write_text(written, encoding="utf-8")
    typer.echo(result.to_json() if as_json else result.to_markdown(), nl=False)
    if report is not None:
        say(f"wrote {report}" + (PAGE if report.suffix == ".json" else ""))


def _engine(name: str, url: str | None, served: str | None, api_key: str | None) -> Engine | None:
    """What computes the model; None for transformers."""
    from ...evals.engines import engine_of, url_engine

    if url is None:
        return engine_of(name)
    if name != ENGINES[0]:
        raise UserError(f"--engine {name} and --url are two engines: give one of the two")
    return url_engine(url, served, api_key)


def _check_beside(engine: Engine, **asked: object) -> None:
    """UserError for the first option that is asked for and that the engine cannot answer."""
    told = engine.computed.top is not None
    for option, value in asked.items():
        if value and (told or option == "inputs"):
            raise UserError(
                f"--{option} is of what lowbit computes itself, not {engine.computed.name}: leave "
                "one of the two out"
            )


def _generation(count: int, text: str, tokenizer: Any) -> GenerationPlan:
    """So many prompts from a text."""
    from ...calib.text import tokenize
    from ...evals.generation import PROMPT_TOKENS, SPACING, GenerationPlan, cut_prompts

    tokens = tokenize(text, tokenizer, max(count, 1) * PROMPT_TOKENS * SPACING).tolist()
    return GenerationPlan(cut_prompts(tokens, count))
