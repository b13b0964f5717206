"""Measure a model, or several that were made from one base, in one pass over a text.

All models are held at once and take turns on each window: the base's log-probabilities are computed
once and serve every candidate, and nothing but running sums outlives the window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..calib.memory import keep_freed_memory
from ..calib.text import Text, load_tokenizer, tokenize
from ..kernels.device import resolve_device
from ..kernels.errors import UserError
from ..quantize.gguf.as_folder import contents_behind
from ..quantize.kv_names import describe_kv
from ..quantize.planning.foresee import duration
from .divergence import DivergenceTally
from .engines import Engine, Loading
from .generation import GenerationPlan, measure_generation
from .linears import linear_results
from .perplexity import NllTally, Scorer
from .protocols import tokenizing
from .report import Protocol, Report, Row, environment
from .scorer import TransformersScorer, load_scorer, measuring_dtype
from .size import size_report
from .speed import DecodeSpeed, SpeedPlan, decode_speed_apart
from .tasks import Task, TaskResult, answers, task_result
from .told import Teller, predicted
from .windows import Window, Windowing, cut_windows

WORTH_SAYING = 20.0  # seconds that a pass still takes
FLOOR_DTYPE = "bfloat16"
FLOOR = "\0noise floor"  # beside the models' names, of which none is like it


def measure_models(
    models: Mapping[str, str | Path],
    text: Text,
    windowing: Windowing,
    *,
    base: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    speed: SpeedPlan | None = None,
    kv: str | Mapping[str, str] = "auto",
    protocol: str | None = None,
    noise_floor: bool = False,
    tasks: Sequence[Task] = (),
    generation: GenerationPlan | None = None,
    inputs: str = "exact",
    engines: Mapping[str, Engine] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Perplexity and size of each of `models` (name -> folder), in order; where `base` names one,
    the divergence of every other from it; with a `speed` plan, decode speed and peak memory.

    The base's tokenizer is used for all (else the first model's). `kv`: a format of the KV cache
    (quantize/kv_names.py) for all models but the base or, by name, for some; "auto" for what each
    checkpoint says. `protocol`: the name of the windowing, for the report. `noise_floor`: measure
    the base in bfloat16 against itself, too. `tasks`: questions that each model is to answer.
    `generation`: prompts that each goes on from.
    `inputs`: "llama.cpp" rounds those of GGUF files as llama.cpp does (llamacpp_inputs.py).
    `engines`: by name, what computes a model in place of transformers' forward pass (engines.py).
    `say` is told what a long pass will take. Progress goes to standard error. Raises UserError for
    a model or text that cannot be measured.
    """
    start = time.perf_counter()
    assert models and (base is None or base in models), (list(models), base)
    folders = {name: Path(folder) for name, folder in models.items()}
    first = base or next(iter(folders))
    where = resolve_device(device)
    tokenizer = load_tokenizer(folders[first])
    windows = cut_windows(
        text_ids(text.text, tokenizer, windowing), windowing, tokenizer.bos_token_id
    )
    engines = engines or {}
    urls = {name: engine.url for name, engine in engines.items() if engine.url is not None}
    sizes = {name: size_report(f) for name, f in folders.items() if name not in urls}
    caches, read = _caches(folders, kv, base), _inputs(folders, inputs)
    wanted = {n: Loading(f, dtype, where, caches[n], windowing.ctx) for n, f in folders.items()}
    loaded = _loaded(wanted, engines, read)
    stored = _stored_caches(loaded)
    used = _used_dtype(loaded[first], dtype, where, folders[first])
    floor = {FLOOR: _floor_scorer(folders, base, used, where)} if noise_floor else {}
    nll, kld = _tally({**loaded, **floor}, windows, base, say)
    answered = _answered(loaded, tasks, tokenizer, base)
    del floor, loaded  # their memory is wanted by the processes that measure speed
    speeds = _speeds(folders, speed, where, caches)
    said = {}
    if generation is not None:
        said = measure_generation(folders, generation, base, used, where, caches)
    told = {
        "speed": speeds, "kv": stored, "tasks": answered, "inputs": read, "generation": said,
        "size": sizes, "linears": {name: linear_results(folders[name]) for name in sizes},
        "engine": {name: engine.computed for name, engine in engines.items()},
    }  # fmt: skip
    rows = _rows({**folders, **urls}, nll, kld, told)
    measured = replace(
        _protocol(text, windowing, windows, rows[0].perplexity.tokens),
        base=base, tokenizer=str(folders[first]), dtype=used, name=protocol,
    )  # fmt: skip
    noise = kld[FLOOR].result() if noise_floor else None
    return Report(measured, environment(where), rows, time.perf_counter() - start, noise)


def _rows(
    places: Mapping[str, Path | str],
    nll: Mapping[str, NllTally],
    kld: Mapping[str, DivergenceTally],
    told: Mapping[str, Mapping[str, Any]],
) -> list[Row]:
    """Each model's results. places: folders, and servers' addresses; told: field of Row -> model ->
    value, absent where there is none."""
    return [
        Row(
            name=name,
            path=place if isinstance(place, str) else _origin(place),
            perplexity=nll[name].result(),
            divergence=kld[name].result() if name in kld else None,
            **{field: values.get(name) for field, values in told.items()},
        )
        for name, place in places.items()
    ]


def _protocol(text: Text, windowing: Windowing, windows: list[Window], scored: int) -> Protocol:
    """Of the text and its windows; of the models nothing yet."""
    return Protocol(
        base=None,
        text=text.name,
        text_sha256=text.sha256,
        text_description=text.description,
        tokenizer="",
        windowing=windowing,
        windows=len(windows),
        scored_tokens=scored,
        positions=sum(w.positions for w in windows),
        dtype="",
    )


def text_ids(text: str, tokenizer: Any, windowing: Windowing) -> Tensor:
    """Token ids int64 [n] of as much of a text as `windowing` reads, with what it puts before."""
    ids = tokenize(text, tokenizer, windowing.tokens)
    if not windowing.special:
        return ids
    before = torch.tensor(tokenizing(tokenizer).prefix, dtype=ids.dtype)
    return torch.cat([before, ids])[: windowing.tokens]


def _floor_scorer(
    folders: Mapping[str, Path], base: str | None, used: str, where: torch.device
) -> Scorer:
    """The base in bfloat16; UserError without a base or where it is measured in bfloat16 itself."""
    if base is None:
        raise UserError("the noise floor is the base's: name it with --base")
    if used == FLOOR_DTYPE:
        raise UserError(
            f"the noise floor compares the base with itself in {FLOOR_DTYPE}, but it is measured "
            f"in {FLOOR_DTYPE}; give --dtype float32"
        )
    return load_scorer(folders[base], FLOOR_DTYPE, where)


def _loaded(
    wanted: Mapping[str, Loading], engines: Mapping[str, Engine], read: Mapping[str, str]
) -> dict[str, Scorer | Teller]:
    """Each model by its engine, transformers where none is named. read: rounding of inputs."""
    return {
        name: engines[name].load(asked) if name in engines
        else load_scorer(
            asked.folder, asked.dtype, asked.device, asked.kv, read.get(name, "exact")
        )
        for name, asked in wanted.items()
    }  # fmt: skip


def _stored_caches(loaded: Mapping[str, Scorer | Teller]) -> dict[str, str]:
    """How the caches are quantized that transformers' models read from."""
    caches = {n: s.kv for n, s in loaded.items() if isinstance(s, TransformersScorer)}
    return {name: describe_kv(kv.spec) for name, kv in caches.items() if kv is not None}


def _used_dtype(first: Scorer | Teller, dtype: str, where: torch.device, folder: Path) -> str:
    """What the first model is computed in; of a teller only it knows."""
    if isinstance(first, Teller):
        return "its own"
    return str(measuring_dtype(dtype, where, folder)).removeprefix("torch.")


def _caches(
    folders: Mapping[str, Path], kv: str | Mapping[str, str], base: str | None
) -> dict[str, str]:
    """The format of each model's cache; the base's is what its checkpoint says."""
    given = dict.fromkeys(folders, kv) if isinstance(kv, str) else kv
    return {name: "auto" if name == base else given.get(name, "auto") for name in folders}


def _inputs(folders: Mapping[str, Path], inputs: str) -> dict[str, str]:
    """How inputs are rounded, of the models whose are: those of GGUF files. UserError where that is
    asked for and none is one."""
    if inputs == "exact":
        return {}
    files = [name for name, folder in folders.items() if contents_behind(folder) is not None]
    if not files:
        raise UserError(f"{inputs}'s inputs are those of a GGUF file, but none is measured")
    return dict.fromkeys(files, inputs)


def _origin(folder: Path) -> str:
    """The path that a report names: of the GGUF file where the folder stands for one."""
    file = contents_behind(folder)
    return str(folder) if file is None else file.path


def _tally(
    scorers: Mapping[str, Scorer | Teller],
    windows: list[Window],
    base: str | None,
    say: Callable[[str], None],
) -> tuple[dict[str, NllTally], dict[str, DivergenceTally]]:
    """The sums over all windows, of each model and of each but the base against it. The first two
    windows tell what the rest will take: the first warms up."""
    others = [name for name in scorers if name != base]
    nll = {name: NllTally() for name in scorers}
    kld = {name: DivergenceTally() for name in others if base is not None}
    steps = len(windows) * len(scorers)
    keep_freed_memory()
    with tqdm(total=steps, desc="measuring", unit="window", disable=None) as bar:
        for number, window in enumerate(windows):
            start = time.perf_counter()
            reference = None
            for name in ([base] if base is not None else []) + others:
                log_probs = predicted(scorers[name], window, reference)
                nll[name].add(log_probs, window)
                if name == base:
                    reference = log_probs
                elif reference is not None:
                    kld[name].add(reference, log_probs, window)
                del log_probs  # before the next model makes its own
                bar.update()
            if number == 1:
                left = len(windows) - 2
                seconds = left * (time.perf_counter() - start)
                if seconds > WORTH_SAYING:
                    say(f"about {duration(seconds)} for the other {left:,} windows")
    return nll, kld


def _answered(
    scorers: Mapping[str, Scorer | Teller], tasks: Sequence[Task], tokenizer: Any, base: str | None
) -> dict[str, list[TaskResult]]:
    """The results of every task, by model; the base's own have nothing beside them."""
    steps = len(scorers) * sum(len(task.questions) for task in tasks)
    found: dict[str, list[TaskResult]] = {name: [] for name in scorers} if tasks else {}
    with tqdm(total=steps, desc="answering", unit="question", disable=None if tasks else True) as b:
        for task in tasks:
            given = {n: answers(s, task, tokenizer, b.update) for n, s in scorers.items()}
            for name in found:
                other = None if name == base or base is None else given[base]
                found[name].append(task_result(task.name, given[name], other))
    return found


def _speeds(
    folders: Mapping[str, Path],
    plan: SpeedPlan | None,
    device: torch.device,
    caches: Mapping[str, str],
) -> dict[str, DecodeSpeed]:
    """Of each model, on the same device and with as many threads as the rest."""
    if plan is None:
        return {}
    plan = replace(plan, threads=plan.threads or torch.get_num_threads())
    bar = tqdm(folders.items(), desc="timing", unit="model", disable=None)
    return {
        name: decode_speed_apart(folder, replace(plan, kv=caches[name]), str(device))
        for name, folder in bar
    }
