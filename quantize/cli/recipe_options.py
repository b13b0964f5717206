"""The options that make a recipe: defined once, for every command that takes one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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
PARTS = ("weight_pass", "gptq", "calibration", "execution")


class Option(NamedTuple):
    """An option of a recipe: None unless it is given; the help shows the recipe's default.

    kind: of its value. part: of `build_recipe`'s parameters, the group that takes it under `key`
    (its name where that is ""), or "" where it is a parameter itself. flags: where they are not
    made of the name. panel: of the help page.
    """

    name: str
    kind: Any
    default: Any
    help: str
    part: str = ""
    key: str = ""
    flags: tuple[str, ...] = ()
    panel: str | None = None

    @property
    def parameter(self) -> inspect.Parameter:
        """The option as typer takes it from a command's signature."""
        shown = "auto" if self.default is None else self.default
        text = self.help if self.default is NOTHING else f"{self.help} \\[default: {shown}]"
        made = typer.Option(*self.flags, help=text, rich_help_panel=self.panel, show_default=False)
        annotation = Annotated[self.kind | None, made]
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Parameter(self.name, place, default=None, annotation=annotation)


def _gptq(name: str, kind: Any, default: Any, help_text: str, *flags: str) -> Option:
    return Option(name, kind, default, help_text, "gptq", flags=flags, panel="GPTQ")


NOTHING = object()  # a default that the help does not show
OPTIONS = (
    Option("scheme", str, PASS.scheme, "What is stored: W4A16, W3A16, ...", "weight_pass"),
    Option(
        "method", str, PASS.method,
        "A quantizer (gptq, rtn, hqq, signround), transforms before it joined by + (awq, "
        "smoothquant, rotate): awq+gptq, rotate+gptq, smoothquant+rtn. none: the weights stay "
        "(with --kv).",
        "weight_pass",
    ),
    Option(
        "preset", str, "balanced", "fast, balanced or best: the methods that suit the scheme."
    ),
    Option(
        "group_size", int, None, "Input columns that share a scale; -1: one a channel.",
        "weight_pass",
    ),
    Option(
        "targets", list[str], "Linear", "Names, re: patterns or class names (repeat).",
        "weight_pass",
    ),
    Option("ignore", list[str], "none", "The same, to leave alone.", "weight_pass"),
    Option(
        "calib", str, CALIBRATION.source,
        "wikitext, pydoc, auto, FILE.txt, FILE.jsonl or a Hub id.", "calibration", "source",
    ),
    Option("samples", int, CALIBRATION.samples, "Calibration rows.", "calibration"),
    Option("seq_len", int, CALIBRATION.seq_len, "Tokens of a row.", "calibration"),
    Option("seed", int, CALIBRATION.seed, "Of the draw of --shuffle.", "calibration"),
    Option(
        "shuffle", bool, "the first ones", "Draw the rows at random.", "calibration",
        flags=("--shuffle/--no-shuffle",),
    ),
    Option(
        "all_experts", bool, "those routed to it", "Calibrate each expert on all tokens.",
        "calibration", flags=("--all-experts/--no-all-experts",),
    ),
    Option(
        "budget", float, "none",
        "Mean bits per weight, scales counted: each linear's bits and group size are chosen "
        "by measured sensitivity.",
    ),
    Option(
        "layout", str, NATIVE, f"The checkpoint's layout: {', '.join(FORMATS)}.",
        flags=("--format",),
    ),
    Option("kv", str, "none", "How the KV cache is to be stored: int8, fp8, int4, k4v2, ..."),
    Option(
        "settings", list[str], "none",
        "A setting of a method: gptq.block_size=32, budget.samples=8 (repeat).",
        flags=("--set",),
    ),
    Option(
        "dtype", str, EXECUTION.dtype, "Of forward passes: auto, float32, bfloat16, float16.",
        "execution",
    ),
    Option(
        "order", str, EXECUTION.order, "sequential, or parallel (slower, less memory).",
        "execution",
    ),
    Option("batch_size", int, EXECUTION.batch_size, "Rows of one forward pass.", "execution"),
    _gptq("dampening_frac", float, GPTQ.dampening_frac, "Share of H's mean diagonal added."),
    _gptq("block_size", int, GPTQ.block_size, "Columns between lazy updates."),
    _gptq("act_order", str, GPTQ.act_order, "static, none or desc_act (GPTQ formats alone)."),
    _gptq("static_groups", bool, "on", "Scales fixed before.",
          "--static-groups/--no-static-groups"),
    _gptq("scale_search", str, GPTQ.scale_search, "hessian or minmax."),
    _gptq("input_correction", float, GPTQ.input_correction,
          "Share of the inputs' error made up for."),
    _gptq("refine_rounds", int, GPTQ.refine_rounds, "Later looks at scales and codes."),
    Option(
        "recipe", Path, NOTHING, "A recipe in YAML; options given beside it override it.", "",
        "base",
    ),
)  # fmt: skip


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of a recipe in place of its parameter `chosen`, which is given the
    Recipe that they make."""
    own = inspect.signature(command, eval_str=True).parameters
    listed = list(own.values())
    place = list(own).index("chosen")
    listed[place : place + 1] = [option.parameter for option in OPTIONS]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        chosen = recipe_from_options({o.name: values.pop(o.name) for o in OPTIONS})
        command(**values, chosen=chosen)

    with_options.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    return with_options


def recipe_from_options(values: Mapping[str, Any]) -> Recipe:
    """The recipe that the options given (None: not given) make of the recipe file or the
    defaults."""
    parts: dict[str, Any] = {part: {} for part in PARTS}
    for option in OPTIONS:
        taken_by = parts[option.part] if option.part else parts
        value = values[option.name]
        taken_by[option.key or option.name] = None if value == [] else value
    parts["settings"] = parts["settings"] or ()
    return build_recipe(**parts)


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
        _put_methods(data, methods)
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
        _put_named(data, setting)
    if data.get("budget") and "bits" not in data["budget"]:
        raise UserError("--set budget.* says how bits are given out; say how many with --budget")
    if layout is not None:
        data["format"] = layout
    data["calibration"] |= _given(calibration)
    data["execution"] |= _given(execution)
    return Recipe.from_dict(data)


def _put_methods(data: dict[str, Any], methods: Methods) -> None:
    """The passes of a preset, with its settings."""
    data["passes"] = chained(data["passes"], methods.chain)
    for name, values in methods.settings.items():
        for key, value in values.items():
            _put_setting(data["passes"], name, key, value)


def _put_named(data: dict[str, Any], setting: str) -> None:
    """A setting as --set names it, METHOD.NAME=VALUE."""
    key, equals, text = setting.partition("=")
    method, dot, name = key.partition(".")
    if not (equals and dot and method and name):
        raise UserError(f"--set takes METHOD.NAME=VALUE, got '{setting}'")
    value = read_yaml(text, f"--set {key}: '{text}'")
    if method == "budget":
        data["budget"] = {**(data.get("budget") or {}), name: value}
    else:
        _put_setting(data["passes"], method, name, value)


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
