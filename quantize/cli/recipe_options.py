"""The options that make a recipe: defined once, for every command that takes one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...kernels.errors import UserError
from ..config_reading import read_yaml
from ..layout_check import FORMATS, NATIVE
from ..passes.settings import one_of
from ..presets import Methods, preset_methods
from ..recipe import Calibration, Execution, Recipe, WeightPass
from ..recipe_passes import QUANTIZERS, TRANSFORMS

PASS, CALIBRATION, EXECUTION = WeightPass(), Calibration(), Execution()
GPTQ = PASS.gptq


def _option(default: Any, help_text: str, *names: str, panel: str | None = None) -> Any:
    """An option that is None unless it is given; the help shows the recipe's default."""
    shown = "auto" if default is None else default
    text = f"{help_text} \\[default: {shown}]"
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of a recipe in place of its parameter `chosen`, which is given the
    Recipe that they make."""
    own = inspect.signature(command, eval_str=True).parameters
    options = inspect.signature(recipe_from_options, eval_str=True).parameters
    listed = list(own.values())
    place = list(own).index("chosen")
    listed[place : place + 1] = options.values()

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        chosen = recipe_from_options(**{name: values.pop(name) for name in options})
        command(**values, chosen=chosen)

    with_options.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    return with_options


def recipe_from_options(
    scheme: Annotated[str | None, _option(PASS.scheme, "What is stored: W4A16, W3A16, ...")] = None,
    method: Annotated[
        str | None,
        _option(
            PASS.method,
            "A quantizer (gptq, rtn, hqq, signround), transforms before it joined by + (awq, "
            "smoothquant, rotate): awq+gptq, rotate+gptq, smoothquant+rtn. none: the weights stay "
            "(with --kv).",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        _option("balanced", "fast, balanced or best: the methods that suit the scheme."),
    ] = None,
    group_size: Annotated[
        int | None, _option(None, "Input columns that share a scale; -1: one a channel.")
    ] = None,
    targets: Annotated[
        list[str] | None, _option("Linear", "Names, re: patterns or class names (repeat).")
    ] = None,
    ignore: Annotated[list[str] | None, _option("none", "The same, to leave alone.")] = None,
    calib: Annotated[
        str | None,
        _option(CALIBRATION.source, "wikitext, pydoc, auto, FILE.txt, FILE.jsonl or a Hub id."),
    ] = None,
    samples: Annotated[int | None, _option(CALIBRATION.samples, "Calibration rows.")] = None,
    seq_len: Annotated[int | None, _option(CALIBRATION.seq_len, "Tokens of a row.")] = None,
    seed: Annotated[int | None, _option(CALIBRATION.seed, "Of the draw of --shuffle.")] = None,
    shuffle: Annotated[
        bool | None,
        _option("the first ones", "Draw the rows at random.", "--shuffle/--no-shuffle"),
    ] = None,
    all_experts: Annotated[
        bool | None,
        _option(
            "those routed to it",
            "Calibrate each expert on all tokens.",
            "--all-experts/--no-all-experts",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        _option(
            "none",
            "Mean bits per weight, scales counted: each linear's bits and group size are chosen "
            "by measured sensitivity.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        _option(NATIVE, f"The checkpoint's layout: {', '.join(FORMATS)}.", "--format"),
    ] = None,
    kv: Annotated[
        str | None, _option("none", "How the KV cache is to be stored: int8, fp8, int4, k4v2, ...")
    ] = None,
    settings: Annotated[
        list[str] | None,
        _option(
            "none", "A setting of a method: gptq.block_size=32, budget.samples=8 (repeat).", "--set"
        ),
    ] = None,
    dtype: Annotated[
        str | None, _option(EXECUTION.dtype, "Of forward passes: auto, float32, bfloat16, float16.")
    ] = None,
    order: Annotated[
        str | None, _option(EXECUTION.order, "sequential, or parallel (slower, less memory).")
    ] = None,
    batch_size: Annotated[
        int | None, _option(EXECUTION.batch_size, "Rows of one forward pass.")
    ] = None,
    dampening_frac: Annotated[
        float | None,
        _option(GPTQ.dampening_frac, "Share of H's mean diagonal added.", panel="GPTQ"),
    ] = None,
    block_size: Annotated[
        int | None, _option(GPTQ.block_size, "Columns between lazy updates.", panel="GPTQ")
    ] = None,
    act_order: Annotated[
        str | None,
        _option(GPTQ.act_order, "static, none or desc_act (GPTQ formats alone).", panel="GPTQ"),
    ] = None,
    static_groups: Annotated[
        bool | None,
        _option("on", "Scales fixed before.", "--static-groups/--no-static-groups", panel="GPTQ"),
    ] = None,
    scale_search: Annotated[
        str | None, _option(GPTQ.scale_search, "hessian or minmax.", panel="GPTQ")
    ] = None,
    input_correction: Annotated[
        float | None,
        _option(GPTQ.input_correction, "Share of the inputs' error made up for.", panel="GPTQ"),
    ] = None,
    refine_rounds: Annotated[
        int | None,
        _option(GPTQ.refine_rounds, "Later looks at scales and codes.", panel="GPTQ"),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A recipe in YAML; options given beside it override it.")
    ] = None,
) -> Recipe:
    """The recipe that the options given make of the recipe file or the defaults."""
    return build_recipe(
        recipe,
        weight_pass={
            "scheme": scheme, "method": method, "group_size": group_size,
            "targets": targets or None, "ignore": ignore or None,
        },
        preset=preset,
        kv=kv,
        budget=budget,
        layout=layout,
        settings=settings or [],
        gptq={
            "dampening_frac": dampening_frac, "block_size": block_size, "act_order": act_order,
            "static_groups": static_groups, "scale_search": scale_search,
            "input_correction": input_correction, "refine_rounds": refine_rounds,
        },
        calibration={
            "source": calib, "samples": samples, "seq_len": seq_len, "seed": seed,
            "shuffle": shuffle, "all_experts": all_experts,
        },
        execution={"order": order, "batch_size": batch_size, "dtype": dtype},
    )  # fmt: skip


def build_recipe(
    base: Path | None,
    weight_pass: dict[str, Any],
    gptq: dict[str, Any],
    calibration: dict[str, Any],
    execution: dict[str, Any],
    preset: str | None = None,
    kv: str | None = None,
    budget: float | None = None,
    layout: str | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    """The recipe file (or the defaults) with every option that is not None put in its place.

    settings: "method.name=value", for the pass of that method or for the budget. UserError when an
    option of a pass is given beside a recipe of several weight quantizers.
    """
    data = (Recipe() if base is None else Recipe.from_yaml(base)).to_dict()
    given = _given(weight_pass)
    gptq_is_named = bool(_given(gptq)) or any(s.startswith("gptq.") for s in settings)
    if preset is not None and "method" in given:
        raise UserError("--preset chooses the methods that --method names; give one of them")
    if preset is not None or (base is None and "method" not in given):
        methods = preset_methods(preset or "balanced", given.get("scheme", PASS.scheme))
        if preset is None and gptq_is_named and "gptq" not in methods.chain:
            methods = Methods("gptq")  # whose setting is given
        data["passes"] = chained(data["passes"], methods.chain)
        for name, values in methods.settings.items():
            for key, value in values.items():
                _put_setting(data["passes"], name, key, value)
    if given.get("method") == "none" and kv is None and base is None:
        raise UserError("--method none leaves the weights alone; name a cache format with --kv")
    if "method" in given:
        data["passes"] = chained(data["passes"], given.pop("method"))
    if given:
        _weight_pass(data["passes"], next(iter(given))).update(given)
        where = {k: v for k, v in given.items() if k in ("targets", "ignore")}
        for transform in data["passes"]:
            if transform["method"] in TRANSFORMS and transform["method"] != "rotate":
                transform.update(where)
    for name, value in _given(gptq).items():
        _put_setting(data["passes"], "gptq", name, value)
    if budget is not None:
        data["budget"] = {**(data.get("budget") or {}), "bits": budget}
    if kv is not None:
        data["passes"] = [p for p in data["passes"] if p["method"] != "kv_cache"]
        data["passes"].append({"method": "kv_cache", "kv_cache": {"format": kv}})
    for setting in settings:
        key, equals, text = setting.partition("=")
        method, dot, name = key.partition(".")
        if not (equals and dot and method and name):
            raise UserError(f"--set takes METHOD.NAME=VALUE, got '{setting}'")
        value = read_yaml(text, f"--set {key}: '{text}'")
        if method == "budget":
            data["budget"] = {**(data.get("budget") or {}), name: value}
        else:
            _put_setting(data["passes"], method, name, value)
    if data.get("budget") and "bits" not in data["budget"]:
        raise UserError("--set budget.* says how bits are given out; say how many with --budget")
    if layout is not None:
        data["format"] = layout
    data["calibration"] |= _given(calibration)
    data["execution"] |= _given(execution)
    return Recipe.from_dict(data)


def chained(passes: list[dict[str, Any]], chain: str) -> list[dict[str, Any]]:
    """`passes` with the methods that `chain` names ("awq+gptq"): transforms, then a quantizer.

    What the passes say of where and what stays; a chain without a quantizer rounds to nearest.
    """
    cached = [p for p in passes if p["method"] == "kv_cache"]
    if chain == "none":
        return cached
    methods = [m.strip() for m in chain.split("+")]
    if not any(m in QUANTIZERS for m in methods):
        methods.append("rtn")
    for method in methods:
        one_of("method", method, (*TRANSFORMS, *QUANTIZERS))
    if sum(m in QUANTIZERS for m in methods) > 1:
        raise UserError(f"'{chain}' names two weight quantizers; a linear takes one")
    old = {p["method"]: p for p in passes}
    quantizer = _weight_pass(passes, "method")
    kept = {
        k: v for k, v in quantizer.items() if k in ("scheme", "group_size", "targets", "ignore")
    }
    where = {k: v for k, v in kept.items() if k in ("targets", "ignore")}
    made = []
    for m in methods:
        fresh = {"method": m, **(where if m in TRANSFORMS[1:] else {} if m == "rotate" else kept)}
        made.append(old.get(m, fresh))
    return [*made, *cached]


def _weight_pass(passes: list[dict[str, Any]], option: str) -> dict[str, Any]:
    """The one weight quantizer, for which `option` was given."""
    quantizers = [p for p in passes if p.get("method", PASS.method) in QUANTIZERS]
    if len(quantizers) != 1:
        raise UserError(
            f"'{option}' is given beside a recipe of {len(quantizers)} weight quantizers; "
            "change it in the recipe file"
        )
    return quantizers[0]


def _put_setting(passes: list[dict[str, Any]], method: str, name: str, value: Any) -> None:
    """Put `name` of the settings of the pass of `method`."""
    found = [p for p in passes if p["method"] == method]
    if not found:
        raise UserError(
            f"'{name}' is a setting of {method}, but the recipe's passes are "
            f"{', '.join(p['method'] for p in passes)}"
        )
    if len(found) > 1:
        raise UserError(
            f"'{name}' is given beside a recipe of {len(found)} passes of {method}; change it in "
            "the recipe file"
        )
    found[0][method] = {**found[0].get(method, {}), name: value}


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
