"""A bench from its plan to a results file: engines in this process, or a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...calib.text import load_text, load_tokenizer, tokenize
from ...kernels.device import resolve_device
from ...kernels.errors import UserError
from ...runtime import LLM, AsyncEngine
from ..report import environment, plain
from ..results import header
from ..scorer import context_limit
from ..size import size_report
from .checks import checked
from .comparisons import Variant
from .drive import drive
from .memory import MemorySplit, MemoryWatch
from .plan import BenchPlan, check_room, make_loads, sweep_loads
from .roofline import Ceilings, Phase, decode_phase, measure_ceilings, prefill_phase, work_of
from .served import Cell, Checker, Loads, Ratio, Served, Sides, measure_cells, measure_load
from .targets import EngineTarget, UrlTarget

TEXT_TOKENS = 200_000  # of the text that prompts are cut from, at most
SEQUENCES = 16  # that run at once where the plan names no number
Say = Callable[[str], None]


@dataclass(frozen=True)
class EngineOptions:
    """Of every engine. kv: the format of its cache; max_num_seqs: None for as many as the plan
    sends at once."""

    device: str = "auto"
    dtype: str = "auto"
    kv: str = "auto"
    max_num_seqs: int | None = None


class Roofline(NamedTuple):
    """weight_bytes: of all matrices; kv_bytes_per_token: of all layers."""

    ceilings: Ceilings
    weight_bytes: int
    kv_bytes_per_token: float
    phases: list[Phase]


@dataclass
class Bench:
    """What a bench has measured, as a results file's row has it. engine: in words; options: of each
    variant; memory: by variant."""

    engine: str
    options: dict[str, dict[str, str]]
    slo: dict[str, float | None] | None
    loads: list[Served]
    ratios: list[Ratio]
    sweep: list[Cell]
    memory: dict[str, MemorySplit]
    roofline: Roofline | None = None


class Prompts(NamedTuple):
    """What prompts are cut from. source: in words."""

    tokens: list[int]
    encode: Callable[[str], Sequence[int]]
    source: str


def prompts_of(folder: str | Path, text: str) -> Prompts:
    """The tokens of a text, by a model's own tokenizer."""
    tokenizer = load_tokenizer(folder)
    loaded = load_text(text, "evaluation", tokenizer)
    tokens = tokenize(loaded.text, tokenizer, TEXT_TOKENS).tolist()

    def encode(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False)["input_ids"]

    return Prompts(tokens, encode, f"{loaded.name}, sha256 {loaded.sha256[:12]}")


def bench_engines(
    folder: Path,
    plan: BenchPlan,
    variants: Sequence[Variant],
    options: EngineOptions,
    text: str,
    explain: bool,
    say: Say,
) -> dict[str, Any]:
    """The results file of our engine, once for each variant; all are in memory together."""
    check_room(plan, context_limit(folder), str(folder))
    prompts = prompts_of(folder, text)
    engines: dict[str, LLM] = {}
    for variant in variants:
        say(f"loading {variant.name}")
        engines[variant.name] = _load(folder, plan, variant, options)
    longest = min(llm.max_model_len for llm in engines.values())
    loads = make_loads(plan, prompts.tokens, prompts.encode, longest, prompts.source)
    bench = asyncio.run(_bench_engines(engines, plan, loads, prompts, say))
    bench.options = {v.name: {k: str(o) for k, o in v.options.items()} for v in variants}
    if explain:
        bench.roofline = _explain(next(iter(engines.values())), bench.sweep)
    device = next(iter(engines.values())).device
    return _results(folder.name, str(folder), size_report(folder)._asdict(), bench, device)


def bench_url(
    url: str, name: str | None, api_key: str | None, folder: Path, plan: BenchPlan, text: str,
    say: Say,
) -> dict[str, Any]:  # fmt: skip
    """The results file of a server. folder: of the tokenizer of the model that it serves."""
    prompts = prompts_of(folder, text)
    longest = plan.longest or 1 << 30
    loads = make_loads(plan, prompts.tokens, prompts.encode, longest, prompts.source)

    async def run() -> tuple[str, Bench]:
        async with UrlTarget(url, name, api_key) as target:
            served = str(target.model)
            say(f"{served} at {target.url}")
            bench = _empty(f"a server at {target.url}", plan)
            checker: Checker = lambda load, found: checked(load.jobs, found, None, False)  # noqa: E731
            one = Sides({served: target}, {served: checker}, warm=False)
            await _measure(bench, one, plan, loads, prompts, say)
            return served, bench

    served, bench = asyncio.run(run())
    return _results(served, url, None, bench, resolve_device("cpu"))


def _load(folder: Path, plan: BenchPlan, variant: Variant, options: EngineOptions) -> LLM:
    """An engine with room for what the plan sends, and not for more. UserError where it is another
    than the one whose options are compared."""
    sequences = options.max_num_seqs or plan.at_once or SEQUENCES
    given = {
        "kv_cache_dtype": options.kv,
        "max_num_seqs": sequences,
        "max_model_len": plan.longest if plan.longest and plan.lengths is None else None,
        **variant.options,
    }
    llm = LLM(folder, options.device, options.dtype, **given)
    if variant.options and llm.engine != "paged":
        raise UserError(f"--compare is of the paged engine, which {llm.engine_declined}")
    return llm


async def _bench_engines(
    engines: Mapping[str, LLM], plan: BenchPlan, loads: Sequence[Loads], prompts: Prompts, say: Say
) -> Bench:
    first = next(iter(engines.values()))
    dtype = str(first.dtype).removeprefix("torch.")
    bench = _empty(f"lowbit, {first.engine} engine, {dtype}", plan)
    checkers = {name: _checker(llm) for name, llm in engines.items()}
    cells = sweep_loads(plan, prompts.tokens, prompts.source)
    first_loads = [*loads, *(pair[1] for pair in cells.values())]
    async with AsyncExitStack() as stack:
        targets: dict[str, EngineTarget] = {}
        for name, llm in engines.items():
            target = EngineTarget(await stack.enter_async_context(AsyncEngine(llm)))
            targets[name] = target
            say(f"warming up {name}")
            watch = MemoryWatch(llm)
            for each in first_loads:
                await drive(target, each.make(0))
            bench.memory[name] = watch.split()
        await _measure(bench, Sides(targets, checkers, warm=True), plan, loads, prompts, say)
    return bench


async def _measure(
    bench: Bench, sides: Sides, plan: BenchPlan, loads: Sequence[Loads], prompts: Prompts, say: Say
) -> None:
    for each in loads:
        say(f"load: {each.plan.arrivals}")
        served, ratios = await measure_load(sides, each, plan.repeats, plan.slo)
        bench.loads += served
        bench.ratios += ratios
    for (batch, context), pair in sweep_loads(plan, prompts.tokens, prompts.source).items():
        say(f"sweep: batch {batch}, context {context}")
        bench.sweep += await measure_cells(sides, pair, plan.repeats)


def _checker(llm: LLM) -> Checker:
    quantized = llm.kv_cache != "as computed"
    return lambda load, found: checked(load.jobs, found, llm.logits, quantized)


def _explain(llm: LLM, sweep: Sequence[Cell]) -> Roofline:
    """The roofline of the first engine's cells."""
    work = work_of(llm)
    top = measure_ceilings(llm.device, llm.dtype)
    phases = []
    first = sweep[0].variant
    for cell in sweep:
        if cell.variant != first or cell.prefill is None:
            continue
        at = cell.batch, cell.context
        seconds = cell.batch * cell.context / cell.prefill.median
        phases.append(prefill_phase(work, *at, seconds, top))
        if cell.decode is not None:
            phases.append(decode_phase(work, *at, cell.batch / cell.decode.median, top))
    return Roofline(top, work.weight_bytes, work.kv_bytes, phases)


def _empty(engine: str, plan: BenchPlan) -> Bench:
    slo = None if plan.slo is None else vars(plan.slo).copy()
    return Bench(engine, {}, slo, [], [], [], {})


def _results(
    name: str, path: str, size: dict[str, Any] | None, bench: Bench, device: torch.device
) -> dict[str, Any]:
    row = {"name": name, "path": path, "size": size, "bench": plain(bench)}
    return {
        **header("bench"),
        "environment": plain(environment(device)),
        "protocol": None,
        "rows": [row],
    }


def failures(results: dict[str, Any]) -> list[str]:
    """Of a bench's results, what failed its check and why."""
    bench = results["rows"][0]["bench"]
    return [
        f"{found['variant']}: {found['check']['failed']}"
        for found in [*bench["loads"], *bench["sweep"]]
        if found["check"]["failed"] is not None
    ]
