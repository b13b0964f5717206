"""Every option of `quantize run` reaches the recipe, and a recipe survives YAML."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.app import app
from lowbit.quantize.passes.settings import BudgetSettings, GPTQSettings
from lowbit.quantize.recipe import (
    DTYPES,
    Calibration,
    Execution,
    KVCachePass,
    Recipe,
    Transform,
    WeightPass,
)
from lowbit.quantize.recipe_passes import QUANTIZERS, TRANSFORMS
from lowbit.quantize.spec import PRESETS
from typer.testing import CliRunner

FLAG_OF = {"source": "calib"}  # fields whose flag has another name
NOT_OF_THE_RECIPE = {
    "model", "out", "device", "recipe", "dump_recipe", "overwrite", "restart", "as_json", "help",
    "kv", "budget", "settings", "preset", "layout", "max_shard_size",
}  # fmt: skip
NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1)
COUNTS = st.integers(1, 2**40)

# a strategy of valid values for every field that an option may set
VALUES: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    WeightPass: {
        "method": st.sampled_from(QUANTIZERS),
        "scheme": st.sampled_from([*PRESETS, *map(str.lower, PRESETS)]),
        "group_size": st.just(-1) | COUNTS,
        "targets": NAMES.map(tuple),
        "ignore": NAMES.map(tuple),
    },
    GPTQSettings: {
        "dampening_frac": st.floats(0, 1, exclude_min=True),
        "block_size": COUNTS,
        "act_order": st.sampled_from(["static", "none"]),  # desc_act wants a format
        "static_groups": st.booleans(),
        "scale_search": st.sampled_from(["hessian", "minmax"]),
        "input_correction": st.floats(0, 1),
        "refine_rounds": st.integers(0, 100),
    },
    Calibration: {
        "source": st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        "samples": COUNTS,
        "seq_len": st.integers(2, 2**40),
        "seed": st.integers(0, 2**63 - 1),
        "shuffle": st.booleans(),
        "all_experts": st.booleans(),
    },
    Execution: {
        "order": st.sampled_from(["sequential", "parallel"]),
        "batch_size": COUNTS,
        "dtype": st.sampled_from(DTYPES),
    },
}
ALL = [(owner, name) for owner, table in VALUES.items() for name in table]


@st.composite
def given_options(draw: st.DrawFn) -> dict[tuple[type, str], Any]:
    """Some of the options with valid values (which may contradict each other)."""
    chosen = draw(st.lists(st.sampled_from(ALL), unique=True))
    if (WeightPass, "method") not in chosen:  # without it, the scheme's preset decides
        chosen.append((WeightPass, "method"))
    return {(owner, name): draw(VALUES[owner][name]) for owner, name in chosen}


def flags(options: dict[tuple[type, str], Any]) -> list[str]:
    """The options as a command line has them."""
    line: list[str] = []
    for (_, name), value in options.items():
        flag = FLAG_OF.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            line += [f"--{flag}={v}" for v in value]
        else:
            line.append(f"--{flag}={value}")
    return line


def with_options(base: Recipe, options: dict[tuple[type, str], Any]) -> Recipe:
    """`base` with the fields set directly; UserError when they contradict each other."""

    def chosen(owner: type) -> dict[str, Any]:
        return {name: value for (o, name), value in options.items() if o is owner}

    (only,) = base.passes
    assert isinstance(only, WeightPass)
    gptq = replace(only.gptq, **chosen(GPTQSettings))
    if chosen(GPTQSettings) and chosen(WeightPass).get("method", only.method) != "gptq":
        raise UserError("a setting of gptq beside another method")
    recipe = Recipe(
        passes=(replace(only, **chosen(WeightPass), gptq=gptq),),
        calibration=replace(base.calibration, **chosen(Calibration)),
        execution=replace(base.execution, **chosen(Execution)),
    )
    return Recipe.from_dict(recipe.to_dict())  # without settings of methods that are not taken


def dump(*args: str) -> Recipe:
    """The recipe that `quantize run ... --dump-recipe` prints; raises what it refuses with."""
    result = CliRunner().invoke(app, ["run", "MODEL", "-o", "OUT", "--dump-recipe", *args])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return read(result.stdout)


def read(text: str) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        return Recipe.from_yaml(write(Path(folder), text))


def write(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    return file


def run_parameters() -> dict[str, Any]:
    command = typer.main.get_command(app)
    return {p.name: p for p in command.commands["run"].params}  # type: ignore[attr-defined]


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    options = set(run_parameters()) - NOT_OF_THE_RECIPE
    assert options == {FLAG_OF.get(name, name) for _, name in ALL}
    for owner, table in VALUES.items():
        assert {f.name for f in fields(owner)} - set(QUANTIZERS) == set(table)
    of_a_recipe = {"passes", "calibration", "execution", "budget", "format"}
    assert {f.name for f in fields(Recipe)} == of_a_recipe


def test_a_chain_of_methods_is_a_list_of_passes() -> None:
    made = dump("--method=awq+gptq", "--scheme=W3A16", "--ignore=re:.*down_proj", "--kv=int8")
    awq, gptq, kv = made.passes
    assert isinstance(awq, Transform) and isinstance(gptq, WeightPass)
    assert (awq.method, gptq.method, gptq.scheme) == ("awq", "gptq", "W3A16")
    assert awq.ignore == gptq.ignore == ("re:.*down_proj",)
    assert isinstance(kv, KVCachePass) and kv.kv_cache.format == "int8"
    assert [p.method for p in dump("--method=rotate").passes] == ["rotate", "rtn"]


def test_a_budget_is_a_number_and_settings() -> None:
    assert dump("--scheme=W3A16").budget is None
    made = dump("--budget=3.5", "--set=budget.num_bits=[3, 4]").budget
    assert made == BudgetSettings(3.5, num_bits=(3, 4))
    with pytest.raises(UserError, match="stores floats"):
        dump("--scheme=FP8", "--budget=3.5")
    with pytest.raises(UserError, match="say how many with --budget"):
        dump("--set=budget.samples=4")


def test_settings_of_every_method_can_be_given() -> None:
    made = dump("--method=awq+rtn", "--set=awq.n_grid=7", "--set=rtn.scale_search=mse")
    awq, rtn = made.passes
    assert isinstance(awq, Transform) and awq.awq.n_grid == 7
    assert isinstance(rtn, WeightPass) and rtn.rtn.scale_search == "mse"
    (cache,) = dump("--method=none", "--kv=int8", "--set=kv_cache.skip_layers=[0]").passes
    assert isinstance(cache, KVCachePass) and cache.kv_cache.skip_layers == (0,)
    for wrong in ("gptq.block_size=[1", "gptq.block_size=*a", "gptq.block_size=2024-13-45"):
        with pytest.raises(UserError, match="not valid YAML"):
            dump(f"--set={wrong}")
    for wrong in ("awq.n_grid=7", "gptq.nothing=1", "gptq.block_size=x", "gptq", "gptq.block_size"):
        with pytest.raises(UserError):
            dump(f"--set={wrong}")


def test_a_setting_of_gptq_keeps_the_presets_transforms() -> None:
    chain = lambda *line: [p.method for p in dump(*line).passes]  # noqa: E731
    assert chain("--scheme=W8A8", "--block-size=32") == ["smoothquant", "gptq"]
    assert chain("--scheme=FP8_DYNAMIC", "--block-size=32") == ["gptq"]


@pytest.mark.parametrize("scheme", PRESETS)
@pytest.mark.parametrize("preset", ["fast", "balanced", "best"])
def test_every_scheme_has_presets(scheme: str, preset: str) -> None:
    made = dump(f"--preset={preset}", f"--scheme={scheme}")
    assert made.weight_passes[0].scheme == scheme
    if preset == "fast":
        assert not made.transforms
    if preset == "balanced":
        assert dump(f"--scheme={scheme}") == made
    with pytest.raises(UserError, match="--preset chooses"):
        dump(f"--preset={preset}", "--method=gptq")


def test_orders_that_make_no_sense_are_refused() -> None:
    for chain in (
        "gptq+awq",
        "awq+smoothquant",
        "awq+rotate",
        "awq+awq",
        "rtn+gptq",
        "smoothquant",
    ):
        with pytest.raises(UserError):
            dump(f"--method={chain}")
    assert set(TRANSFORMS) == {"rotate", "smoothquant", "awq"}


def test_help_shows_the_defaults_of_the_dataclasses() -> None:
    parameters = run_parameters()
    for owner, table in VALUES.items():
        for name in table:
            default = getattr(owner(), name)
            if isinstance(default, str | float) or type(default) is int:
                assert f"[default: {default}]" in parameters[FLAG_OF.get(name, name)].help.replace(
                    "\\", ""
                )


@pytest.mark.parametrize(("owner", "name"), ALL, ids=lambda v: getattr(v, "__name__", v))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_each_option_reaches_the_recipe(owner: type, name: str, data: st.DataObject) -> None:
    options = {(owner, name): data.draw(VALUES[owner][name])}
    if options.get((GPTQSettings, "static_groups")) is False:  # refused beside act_order static
        options[GPTQSettings, "act_order"] = "none"
    if owner is WeightPass:  # without a method, the scheme's preset decides
        options.setdefault((WeightPass, "method"), "rtn")
    assert dump(*flags(options)) == with_options(Recipe(), options)


@settings(max_examples=150, deadline=None)
@given(options=given_options(), base=given_options())
def test_options_override_a_recipe_file(
    options: dict[tuple[type, str], Any], base: dict[tuple[type, str], Any]
) -> None:
    try:
        original = with_options(Recipe(), base)
    except UserError:
        original = Recipe()
    with tempfile.TemporaryDirectory() as folder:
        line = ["--recipe", str(write(Path(folder), original.to_yaml())), *flags(options)]
        try:
            expected = with_options(original, options)
        except UserError as e:
            with pytest.raises(UserError) as refused:
                dump(*line)
            assert str(refused.value) == str(e) or "a setting of gptq" in str(refused.value)
        else:
            assert dump(*line) == expected


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    def some(owner: type) -> dict[str, Any]:
        chosen = draw(st.sets(st.sampled_from(sorted(VALUES[owner]))))
        return {name: draw(VALUES[owner][name]) for name in sorted(chosen)}

    def settled(values: dict[str, Any]) -> GPTQSettings:
        return GPTQSettings(**({**values, "act_order": "none"} if values else values))

    count = draw(st.integers(1, 3))
    try:
        passes = [
            WeightPass(**some(WeightPass), gptq=settled(some(GPTQSettings))) for _ in range(count)
        ]
    except UserError:  # float formats have scales of their own
        reject()
    try:
        recipe = Recipe(
            tuple(passes), Calibration(**some(Calibration)), Execution(**some(Execution))
        )
    except UserError:  # the parallel order follows no float model
        reject()
    return Recipe.from_dict(recipe.to_dict())  # without settings of methods that are not taken


@settings(max_examples=100, deadline=None)
@given(recipe=recipes())
def test_a_recipe_survives_yaml(recipe: Recipe) -> None:
    assert read(recipe.to_yaml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_a_recipe_file_need_not_say_everything(tmp_path: Path) -> None:
    text = "passes:\n- scheme: W3A16\n  gptq: {dampening_frac: 1e-3, block_size: 32}\n"
    assert Recipe.from_yaml(write(tmp_path, text)) == Recipe(
        (WeightPass(scheme="W3A16", gptq=GPTQSettings(0.001, 32)),)
    )
    assert Recipe.from_yaml(write(tmp_path, "calibration: {}\n")) == Recipe()


def test_an_option_of_a_pass_beside_several_passes_is_refused(tmp_path: Path) -> None:
    two = Recipe((WeightPass(targets=("a",)), WeightPass(targets=("b",))))
    file = str(write(tmp_path, two.to_yaml()))
    assert dump("--recipe", file, "--samples=3") == replace(two, calibration=Calibration(samples=3))
    with pytest.raises(UserError, match="'scheme' is given beside a recipe of 2 weight quantizers"):
        dump("--recipe", file, "--scheme=W3A16")
    with pytest.raises(
        UserError, match="'block_size' is given beside a recipe of 2 passes of gptq"
    ):
        dump("--recipe", file, "--block-size=32")
