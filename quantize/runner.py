"""Run a recipe on a model: plan, calibrate, quantize layer by layer, save."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..calib.experts import split_modules
from ..calib.layer_loop import run_layers
from ..calib.model import LayeredModel
from ..calib.text import Text
from ..kernels.device import resolve_device
from ..kernels.errors import counted
from .budget_plan import budgeted_plan
from .cache_layers import check_cache
from .checkpoint.journal import Journal, source_identity
from .checkpoint.layouts import layout_named
from .checkpoint.load import read_config
from .checkpoint.save import LinearStorage, check_output, save_checkpoint
from .expert_calibration import coverage, coverage_notes, with_all_tokens
from .linear_plan import Plan, make_plan, settled_recipe
from .planning.advice import peer_notes
from .planning.foresee import Foresight, Outline, foresee_run
from .prepare import calibration_rows, can_stream, forward_dtype, open_for_passes, stacks_experts
from .recipe import Recipe, WeightPass
from .rotated_source import RotatedSource
from .run_result import RunResult
from .sizes import MAX_SHARD_SIZE, parse_size
from .stream import stream_quantize
from .worker import PassWorker

Say = Callable[[str], None]


def quantize_model(
    folder: str | Path,
    out: str | Path,
    recipe: Recipe,
    device: str = "auto",
    overwrite: bool = False,
    restart: bool = False,
    say: Say = lambda line: None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> RunResult:
    """Quantize the model in `folder` into the checkpoint `out`.

    A run that was killed goes on after its last finished layer when it is called again with the
    same arguments, and gives the same bytes. `say` is handed what the user should know before the
    long work begins. max_shard_size: of a weight file ("5GB", "500MB", a number of bytes), a tensor
    that is larger has a file of its own. Raises UserError before any work for what cannot be done.
    """
    folder, out = Path(folder), Path(out)
    max_shard_bytes = parse_size(max_shard_size, "the largest size of a shard")
    if can_stream(recipe) and not stacks_experts(folder):
        return stream_quantize(
            folder, out, recipe, device, overwrite, restart, say, max_shard_bytes
        )
    start = time.perf_counter()
    check_output(folder, out, overwrite)
    run = _prepare(folder, out, recipe, device, restart)
    recipe, model, plan, notes = run.recipe, run.model, run.plan, run.notes
    journal = Journal(out, _identity(model, recipe, run.rows), restart)
    if damaged := ", ".join(journal.damaged):
        notes.append(f"made anew, for what was finished of them is damaged: {damaged}")
    if journal.resumed:
        notes.append(f"resuming after {counted(journal.resumed, 'finished layer')}")
    for note in [*notes, run.foreseen.sentence()]:
        say(note)
    budget = None
    if recipe.budget is not None:
        assert run.rows is not None, "a budget needs calibration rows"
        plan, budget = budgeted_plan(model, plan, recipe.budget, run.rows, journal)
        notes.append(plan.notes[-1])
        say(notes[-1])
    layout = layout_named(recipe.format)
    worker = PassWorker(model, plan, journal, recipe.transforms, recipe.kv_cache, layout)
    steps = [*model.layers, *([model.head] if model.head in plan.linears else [])]
    bar = tqdm(total=len(steps), desc="quantizing", unit="layer", disable=None)
    with journal.told(), bar:
        run_layers(
            model, run.rows if recipe.needs else None, worker, recipe.execution.order,
            recipe.execution.batch_size, recipe.calibration.all_experts,
            progress=lambda _: bar.update(),
        )  # fmt: skip
    done = _done(journal, steps, plan)
    notes += done.notes
    save_checkpoint(
        model.shards, out, journal, steps,
        LinearStorage({worker.store.stored_name(n): p.scheme for n, p in plan.linears.items()},
                      plan.untouched, layout, recipe.has_g_idx),
        report={"recipe": recipe.to_dict(), "dtype": _name(run.dtype), "notes": plan.notes,
                "dropped_rows": done.dropped_rows, "linears": done.linears,
                "experts": done.experts, "transforms": done.transforms,
                "budget": asdict(budget) if budget else None,
                "calibration": run.text._replace(text="")._asdict() if run.text else None},
        version=version("lowbit"),
        changed=run.rotated.changed if run.rotated else (),
        config_changes=run.rotated.config_changes if run.rotated else None,
        cache=recipe.kv_cache.kv_cache.spec if recipe.kv_cache else None,
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    return RunResult(
        out, recipe, notes, run.text, _name(run.dtype), journal.resumed, done.dropped_rows,
        {n: r["relative_error"] for n, r in done.linears.items() if "relative_error" in r},
        time.perf_counter() - start, worker.seconds, budget, run.foreseen,
    )  # fmt: skip


class _Prepared(NamedTuple):
    """A run that nothing stands in the way of. recipe: with what the model settled. rows, text: of
    calibration, None where no pass reads any. notes: for the user."""

    model: LayeredModel
    rotated: RotatedSource | None
    plan: Plan
    recipe: Recipe
    rows: Tensor | None
    text: Text | None
    dtype: torch.dtype
    foreseen: Foresight
    notes: list[str]


def _prepare(folder: Path, out: Path, recipe: Recipe, device: str, restart: bool) -> _Prepared:
    """Open the model and settle all that a run needs; UserError for what cannot be done."""
    start = time.perf_counter()
    if recipe.kv_cache is not None:
        check_cache(recipe.kv_cache.kv_cache.spec, read_config(folder))
    where = resolve_device(device)
    dtype = forward_dtype(recipe, where, folder, out, restart)
    model, rotated = open_for_passes(folder, recipe, dtype, where)
    plan = make_plan(model, recipe)
    model.check_shards()
    asked = settled_recipe(recipe, plan)
    recipe = with_all_tokens(asked, plan, split_modules(model.model))
    rows, text = calibration_rows(model, recipe) if recipe.reads_text else (None, None)
    outline = Outline(
        plan, recipe, model.shards.info, read_config(folder), model,
        0 if rows is None else len(rows), where,
    )  # fmt: skip
    foreseen = foresee_run(outline, out, time.perf_counter() - start, restart)
    notes = [*plan.notes, *peer_notes(plan)]
    if rows is not None and recipe.execution.dtype == "auto":
        notes.append(f"forward passes in {_name(dtype)} (--dtype auto)")
    if rotated is not None:
        notes.append(rotated.description)
    if recipe != asked:
        notes.append("experts are calibrated on all tokens, for scales of their inputs are stored")
    if text is not None:
        notes.append(f"calibration: {text.description}")
    return _Prepared(model, rotated, plan, recipe, rows, text, dtype, foreseen, notes)


class _Done(NamedTuple):
    """What the reports of all layers come to. linears: by module; transforms: by layer; experts:
    see `coverage`; notes: for the user."""

    linears: dict[str, dict[str, Any]]
    transforms: dict[str, Any]
    experts: dict[str, Any]
    dropped_rows: int
    notes: list[str]


def _done(journal: Journal, steps: list[str], plan: Plan) -> _Done:
    reports = {name: journal.report(name) for name in steps}
    linears = {n: r for report in reports.values() for n, r in report["linears"].items()}
    dropped = len(set().union(*(report["dropped_rows"] for report in reports.values())))
    experts = coverage(linears)
    notes = coverage_notes(experts)
    raised = [n for n, r in linears.items() if _damping_raised(r, plan.linears[n].taken_by)]
    if raised:
        notes.append(f"damping was raised for {counted(len(raised), 'linear')}, first {raised[0]}")
    if dropped:
        notes.append(f"dropped: {counted(dropped, 'calibration row')} with non-finite activations")
    transforms = {name: report["transforms"] for name, report in reports.items()}
    return _Done(linears, transforms, experts, dropped, notes)


def _identity(model: LayeredModel, recipe: Recipe, rows: Tensor | None) -> dict[str, Any]:
    """Everything that the output's bytes depend on."""
    return {
        "model": source_identity(model.shards),
        "config": read_config(model.folder),
        "recipe": recipe.to_dict(),
        "rows": None if rows is None else hashlib.sha256(rows.numpy().tobytes()).hexdigest(),
        "dtype": _name(model.dtype),
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("lowbit", "torch", "transformers")},
    }


def _damping_raised(report: dict[str, Any], taken_by: WeightPass) -> bool:
    """An expert's damping follows from its tokens."""
    tried = taken_by.gptq.dampening_frac
    return report.get("dampening_frac", 0) > tried and "routed_tokens" not in report


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
