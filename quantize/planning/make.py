"""`plan`: what a run would do, give, need and take. No weight is read, nothing is written.

It begins as a run begins (quantize/prepare.py) and so refuses what a run refuses; what a run would
then calculate is estimated.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ...calib import hub
from ...calib.experts import split_modules
from ...calib.model import LayeredModel
from ...calib.source import model_folder
from ...calib.text import load_tokenizer
from ...kernels.device import resolve_device
from ..cache_layers import check_cache
from ..checkpoint.load import read_config
from ..checkpoint.save import check_output
from ..expert_calibration import with_all_tokens
from ..linear_plan import make_plan, plan_linears, settled_recipe
from ..prepare import (
    calibration_rows,
    can_stream,
    check_seq_len,
    forward_dtype,
    open_for_passes,
    stacks_experts,
    streamed_linears,
)
from ..recipe import Recipe
from .advice import Surroundings, advise
from .foresee import Foresight, Outline, foresee
from .machine import available_bytes
from .modules import module_plans
from .parallel import heads_of, unlike_peers
from .report import PlanReport
from .runtimes import runs_as_tape

FETCHED = ("auto", "wikitext")  # texts that may have to be fetched: a plan does not
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
EMBEDDINGS = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight",
    "tok_embeddings.weight",
)  # fmt: skip


def plan(
    model: str | Path,
    recipe: Recipe | None = None,
    out: Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    timed: bool = True,
) -> PlanReport:
    """The dry run of `recipe` on the model folder (or Hub id) `model`.

    out: where the output would go; it is checked and its disk measured where it is given. timed:
    whether this machine is measured for an estimate of time, which takes a few seconds. Raises
    UserError for whatever a run would refuse before its work begins.
    """
    begun = time.perf_counter()
    recipe = recipe or Recipe()
    folder = model_folder(str(model))
    if out is not None:
        check_output(folder, out, overwrite)
    if recipe.kv_cache is not None:
        check_cache(recipe.kv_cache.kv_cache.spec, read_config(folder))
    outline, notes = outline_of(folder, recipe, resolve_device(device))
    place = None if out is None else out.absolute().parent
    foresight = foresee(outline, place, time.perf_counter() - begun, timed)
    return _report(folder, outline, foresight, notes)


def outline_of(folder: Path, recipe: Recipe, device: torch.device) -> tuple[Outline, list[str]]:
    """The run as far as it can be settled without a weight, and what was decided."""
    if can_stream(recipe) and not stacks_experts(folder):
        return _streamed(folder, recipe, device)
    dtype = forward_dtype(recipe, device, folder)
    model, rotated = open_for_passes(folder, recipe, dtype, device, verify=False)
    made = make_plan(model, recipe)
    model.check_shards()
    settled = with_all_tokens(settled_recipe(recipe, made), made, split_modules(model.model))
    notes = list(made.notes)
    if rotated is not None:
        notes.append(rotated.description)
        notes.append("that a rotated layer computes the same is tried by the run")
    samples = 0
    if settled.needs or settled.budget is not None:
        check_seq_len(model, settled)
        samples = settled.calibration.samples
        notes.append(_text_note(model, settled))
    if settled.budget is not None:
        notes.append("schemes are those before the budget is given out, which takes calibration")
    config = read_config(folder)
    return Outline(made, settled, model.shards.info, config, model, samples, device), notes


def _streamed(folder: Path, recipe: Recipe, device: torch.device) -> tuple[Outline, list[str]]:
    config = read_config(folder)
    source, names = streamed_linears(folder, config)
    made = plan_linears(recipe, names.inner, names.outer, names.head)
    settled = settled_recipe(recipe, made)
    info = dict(source.info)
    source.close()
    return Outline(made, settled, info, config, None, 0, device), list(made.notes)


def _text_note(model: LayeredModel, recipe: Recipe) -> str:
    """What is known of the calibration text; UserError where one that is at hand will not do."""
    source = recipe.calibration.source
    if source in FETCHED or hub.names_dataset(source):
        load_tokenizer(model.folder)
        return f"calibration text '{source}' is fetched by the run; it was not looked at"
    _, text = calibration_rows(model, recipe)
    return f"calibration: {text.description}"


def _report(folder: Path, outline: Outline, foresight: Foresight, notes: list[str]) -> PlanReport:
    config, model = outline.config, outline.model
    widest = max(outline.info.values(), key=lambda info: info.nbytes)
    computes_in = torch.bfloat16 if outline.device.type == "cpu" else widest.dtype
    modules = module_plans(
        outline.plan, outline.sources, heads_of(config), computes_in, outline.device,
        runs_as_tape(str(config.get("model_type")), outline.device),
    )  # fmt: skip
    schemes = {m.name: m.scheme for m in modules}
    peers = unlike_peers(schemes)
    tied = _tied_bytes(outline)
    around = Surroundings(tied, available_bytes())
    if foresight.note:
        notes = [*notes, foresight.note]
    return PlanReport(
        model=folder,
        recipe=outline.recipe,
        layout=outline.layout.name,
        device=str(outline.device),
        dtype=str(torch.float32 if model is None else model.dtype).removeprefix("torch."),
        streamed=model is None,
        modules=modules,
        peers=peers,
        tied_bytes=tied,
        foresight=foresight,
        notes=notes,
        advice=advise(modules, peers, foresight, around),
    )


def _tied_bytes(outline: Outline) -> int:
    """Bytes of the embedding where it is the output head too; 0 where it is not."""
    text = outline.config.get("text_config") or outline.config
    tied = text.get("tie_word_embeddings", outline.config.get("tie_word_embeddings"))
    own = not tied and any(name.endswith(HEADS) for name in outline.info)
    if outline.model is not None:  # which a rotation may have given a head of its own
        own = outline.model.head is not None
    if own:
        return 0
    return max((i.nbytes for n, i in outline.info.items() if n.endswith(EMBEDDINGS)), default=0)
