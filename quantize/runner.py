"""Run a recipe on a model: plan, calibrate, quantize layer by layer, save."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..calib.experts import split_modules
from ..calib.layer_loop import run_layers
from ..calib.model import LayeredModel
from ..kernels.device import resolve_device
from .budget_plan import budgeted_plan
from .cache_layers import check_cache
from .checkpoint.journal import Journal, source_identity
from .checkpoint.layouts import layout_named
from .checkpoint.load import read_config
from .checkpoint.save import LinearStorage, check_output, save_checkpoint
from .expert_calibration import coverage, coverage_notes, with_all_tokens
from .linear_plan import make_plan, settled_recipe
from .planning.foresee import Outline, foresee_run
from .prepare import calibration_rows, can_stream, forward_dtype, open_for_passes, stacks_experts
from .recipe import Recipe, WeightPass
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
    journal = Journal(out, _identity(model, recipe, rows), restart)
    notes = list(plan.notes)
    if rows is not None and recipe.execution.dtype == "auto":
        notes.append(f"forward passes in {_name(dtype)} (--dtype auto)")
    if rotated is not None:
        notes.append(rotated.description)
    if recipe != asked:
        notes.append("experts are calibrated on all tokens, for scales of their inputs are stored")
    if text is not None:
        notes.append(f"calibration: {text.description}")
    if journal.resumed:
        notes.append(f"resuming after {journal.resumed} finished layers")
    for note in [*notes, foreseen.sentence()]:
        say(note)
    budget = None
    if recipe.budget is not None:
        assert rows is not None, "a budget needs calibration rows"
        plan, budget = budgeted_plan(model, plan, recipe.budget, rows, journal)
        notes.append(plan.notes[-1])
        say(notes[-1])
    layout = layout_named(recipe.format)
    worker = PassWorker(model, plan, journal, recipe.transforms, recipe.kv_cache, layout)
    steps = [*model.layers, *([model.head] if model.head in plan.linears else [])]
    with tqdm(total=len(steps), desc="quantizing", unit="layer", disable=None) as bar:
        run_layers(
            model, rows if recipe.needs else None, worker, recipe.execution.order,
            recipe.execution.batch_size, recipe.calibration.all_experts,
            progress=lambda _: bar.update(),
        )  # fmt: skip
    reports = [journal.report(name) for name in steps]
    linears = {n: r for report in reports for n, r in report["linears"].items()}
    dropped = len(set().union(*(report["dropped_rows"] for report in reports)))
    experts = coverage(linears)
    notes += coverage_notes(experts)
    raised = [n for n, r in linears.items() if _damping_raised(r, plan.linears[n].taken_by)]
    if raised:
        notes.append(f"damping was raised for {len(raised)} linears, first {raised[0]}")
    if dropped:
        notes.append(f"{dropped} calibration rows with non-finite activations were dropped")
    save_checkpoint(
        model.shards, out, journal, steps,
        LinearStorage({worker.stored_name(n): p.scheme for n, p in plan.linears.items()},
                      plan.untouched, layout, recipe.has_g_idx),
        report={"recipe": recipe.to_dict(), "dtype": _name(dtype), "notes": plan.notes,
                "dropped_rows": dropped, "linears": linears, "experts": experts,
                "transforms": {n: r["transforms"] for n, r in zip(steps, reports, strict=True)},
                "budget": asdict(budget) if budget else None,
                "calibration": text._replace(text="")._asdict() if text else None},
        version=version("lowbit"),
        changed=rotated.changed if rotated else (),
        config_changes=rotated.config_changes if rotated else None,
        cache=recipe.kv_cache.kv_cache.spec if recipe.kv_cache else None,
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    return RunResult(
        out, recipe, notes, text, _name(dtype), journal.resumed, dropped,
        {n: r["relative_error"] for n, r in linears.items() if "relative_error" in r},
        time.perf_counter() - start, worker.seconds, budget, foreseen,
    )  # fmt: skip


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
