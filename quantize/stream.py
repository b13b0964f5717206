"""Quantize without data by streaming: tensor by tensor from the shards, no model is built.

For methods that look at weights alone. The output's shards are laid out before the first weight is
read, since names, shapes and dtypes decide their sizes; every tensor then goes to its place in
chunks of rows. So memory is that of a chunk, whatever the size of the model, of its shards or of a
single tensor (but for the codes of one linear, where the layout stores them transposed), and any
architecture will do whose tensors have the usual names. A run that was killed goes on after the
last tensors that are known to be on disk.

The bytes are those that whole weights give, see stream_weights.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..calib.safetensors_file import DTYPES
from ..calib.shards import TensorSource
from ..kernels.device import resolve_device
from .cache_layers import check_cache
from .checkpoint.journal import Journal, source_identity
from .checkpoint.layouts import Layout, layout_named
from .checkpoint.layouts.base import empty_quantized
from .checkpoint.load import read_config
from .checkpoint.raw import (
    Slot,
    raw_tensors,
    slot,
    split_shards,
    write_index,
)
from .checkpoint.save import LinearStorage, check_output, complete_checkpoint
from .checkpoint.stream_output import StreamOutput
from .fp8_source import FP8Source
from .linear_plan import Plan, plan_linears, settled_recipe
from .planning.advice import peer_notes
from .planning.foresee import Outline, foresee_run
from .prepare import can_stream, streamed_linears
from .recipe import Recipe
from .run_result import RunResult
from .sizes import MAX_SHARD_SIZE, parse_size
from .stream_weights import Converter, Job

Say = Callable[[str], None]


def stream_quantize(
    folder: Path,
    out: Path,
    recipe: Recipe,
    device: str = "auto",
    overwrite: bool = False,
    restart: bool = False,
    say: Say = lambda line: None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> RunResult:
    """Quantize the model in `folder` into the checkpoint `out`, see `runner.quantize_model`.

    Raises UserError before any weight is read for what cannot be done, and for a weight that holds
    NaN or infinite values.
    """
    assert can_stream(recipe), "a recipe that needs calibration"
    start = time.perf_counter()
    max_shard_bytes = parse_size(max_shard_size, "the largest size of a shard")
    check_output(folder, out, overwrite)
    where = resolve_device(device)
    config = read_config(folder)
    if recipe.kv_cache is not None:
        check_cache(recipe.kv_cache.kv_cache.spec, config)
    source, names = streamed_linears(folder, config)
    plan = plan_linears(recipe, names.inner, names.outer, names.head)
    recipe = settled_recipe(recipe, plan)
    layout = layout_named(recipe.format)
    jobs = _jobs(source, plan, layout)
    shards = split_shards((s for job in jobs for s in job.slots), max_shard_bytes)
    outline = Outline(plan, recipe, source.info, config, None, 0, where)
    foreseen = foresee_run(outline, out, time.perf_counter() - start, restart)
    journal = Journal(out, _identity(source, config, recipe, where, max_shard_bytes), restart)
    output = StreamOutput(journal.folder, shards)
    notes = [*plan.notes, *peer_notes(plan)]
    if isinstance(source, FP8Source):
        notes.append("the model is stored in FP8: dequantized as it is read")
    if output.finished:
        notes.append(f"resuming after {len(output.finished)} of {len(jobs)} tensors")
    for note in [*notes, foreseen.sentence()]:
        say(note)
    with journal.told():
        _convert(jobs, Converter(source, plan, where, layout), output)
    journal.check_source(source)
    index = write_index(output.folder, shards)
    complete_checkpoint(
        folder, output.folder, out,
        LinearStorage({n: p.scheme for n, p in plan.linears.items()}, plan.untouched, layout),
        report={"recipe": recipe.to_dict(), "dtype": "float32", "notes": plan.notes,
                "dropped_rows": 0, "calibration": None,
                "linears": {n: {"method": p.taken_by.method} for n, p in plan.linears.items()}},
        version=version("lowbit"),
        cache=recipe.kv_cache.kv_cache.spec if recipe.kv_cache else None,
        written=index,
    )  # fmt: skip
    journal.remove()
    return RunResult(
        out, recipe, notes, None, "float32", len(output.finished), 0, {},
        time.perf_counter() - start, foreseen=foreseen,
    )  # fmt: skip


def _identity(
    source: TensorSource,
    config: dict[str, Any],
    recipe: Recipe,
    device: torch.device,
    max_shard_bytes: int,
) -> dict[str, Any]:
    """Everything that the output's bytes depend on."""
    return {
        "way": "streamed",
        "model": source_identity(source),
        "config": config,
        "recipe": recipe.to_dict(),
        "device": device.type,
        "max_shard_bytes": max_shard_bytes,
        "versions": {name: version(name) for name in ("lowbit", "torch")},
    }


def _jobs(source: TensorSource, plan: Plan, layout: Layout) -> list[Job]:
    """What becomes of every tensor, in the source's order."""
    files = dict.fromkeys(info.file for info in source.info.values())
    original = {t.name: t for file in files for t in raw_tensors(source.folder / file)}
    jobs = []
    for name in source.names():
        info, raw = source.info[name], original.get(name)
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in plan.linears:
            scheme, shape = plan.linears[module].scheme, plan.linears[module].shape
            empty = empty_quantized(scheme.weights, shape, layout.scale_dtype(info.dtype))
            stored = layout.compress(module, empty, scheme)
            jobs.append(Job(name, [slot(n, stored[n]) for n in sorted(stored)], None))
        elif raw is not None and DTYPES[raw.dtype] == info.dtype:
            jobs.append(Job(name, [Slot(name, raw.nbytes, raw.dtype, raw.shape)], raw))
        else:
            made = torch.empty(info.shape, dtype=info.dtype, device="meta")
            jobs.append(Job(name, [slot(name, made)], None))
    return jobs


def _convert(jobs: list[Job], converter: Converter, output: StreamOutput) -> None:
    total = sum(s.nbytes for job in jobs for s in job.slots)
    with tqdm(total=total, desc="quantizing", unit="B", unit_scale=True, disable=None) as bar:
        for job in jobs:
            if job.name not in output.finished:
                for name, data in converter.pieces(job):
                    output.append(name, data)
                output.finish(job.name)
            bar.update(sum(s.nbytes for s in job.slots))
    output.close()
