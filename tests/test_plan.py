"""`quantize plan` against what a run then writes, and what it says without reading a weight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.shards import Shards
from lowbit.evals.size import size_report
from lowbit.kernels.errors import UserError
from lowbit.quantize import plan, run
from lowbit.quantize.checkpoint.journal import Journal
from lowbit.quantize.cli.recipe_options import build_recipe
from lowbit.quantize.fp8_source import FP8Source
from lowbit.quantize.planning.report import PlanReport
from lowbit.quantize.recipe import Recipe

from . import moe_models
from .command import Commands
from .models import change_json, deep_llama
from .runtime_models import FAMILIES, save_tiny

FOUR_DEVICES = 4


def recipe(
    scheme: str = "W4A16",
    method: str = "rtn",
    text: Path | None = None,
    layout: str | None = None,
    kv: str | None = None,
    **options: object,
) -> Recipe:
    calibration = {"source": None if text is None else str(text), "samples": 4, "seq_len": 32}
    return build_recipe(
        None, {"scheme": scheme, "method": method, **options}, {}, calibration,
        {"dtype": "float32"}, layout=layout, kv=kv,
    )  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    return save_tiny(folder, moe_models.FAMILIES["mixtral"]())


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mistral"
    return save_tiny(folder, FAMILIES["mistral"]())


@pytest.fixture
def no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that fail the test when they are read."""

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    for source in (Shards, FP8Source):
        for name in ("get", "get_rows"):
            monkeypatch.setattr(source, name, refuse)


def agrees(report: PlanReport, out: Path) -> None:
    """Size and bits of the plan are those of the checkpoint that was written."""
    planned, written = report.foresight.totals, size_report(out)
    assert planned.tensor_bytes == written.tensor_bytes
    assert planned.weights == written.weights
    assert planned.quantized_weights == written.quantized_weights
    assert planned.bits_per_weight == written.bits_per_weight
    assert planned.quantized_bits_per_weight == written.quantized_bits_per_weight
    stored = Shards(out).info
    for module in report.modules:
        inside = {f"{module.name}.{leaf}" for leaf in LEAVES}
        assert module.bytes_after == sum(i.nbytes for n, i in stored.items() if n in inside)


LEAVES = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "input_scale",
    "weight_global_scale", "input_global_scale", "weight_scale_inv", "qweight", "qzeros", "scales",
    "g_idx",
)  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        ("W4A16", None), ("W3A16_ASYM", None), ("W8A16", None), ("W8A8", None), ("W4A8", None),
        ("FP8_DYNAMIC", None), ("FP8_BLOCK", None), ("NVFP4A16", None), ("MXFP4", None),
        ("MXFP8", None), ("W4A16", "gptq"), ("W4A16_ASYM", "gptq_v2"), ("W4A16_ASYM", "awq"),
        ("FP8_BLOCK", "fp8"),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_streamed_output(
    shallow: Path, tmp_path: Path, scheme: str, layout: str | None
) -> None:
    asked = recipe(scheme, layout=layout)
    report = plan(shallow, asked, timed=False)
    assert report.streamed
    run(shallow, tmp_path / "out", asked)
    agrees(report, tmp_path / "out")


@pytest.mark.parametrize(
    ("scheme", "method", "kv"),
    [
        ("W8A8_STATIC", "rtn", None), ("FP8", "rtn", "fp8"), ("NVFP4", "rtn", None),
        ("W4A16", "rotate+gptq", None), ("W4A16", "gptq", "int8_static"),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_calibrated_output(
    shallow: Path, story: Path, tmp_path: Path, scheme: str, method: str, kv: str | None
) -> None:
    asked = recipe(scheme, method, story, kv=kv)
    report = plan(shallow, asked, timed=False)
    assert not report.streamed
    run(shallow, tmp_path / "out", asked)
    agrees(report, tmp_path / "out")


def test_bytes_of_experts_and_of_a_quantized_head(
    mixtral: Path, untied: Path, tmp_path: Path
) -> None:
    for name, folder, asked in (
        ("experts", mixtral, recipe()),
        ("head", untied, recipe(targets=["Linear", "lm_head"])),
    ):
        report = plan(folder, asked, timed=False)
        run(folder, tmp_path / name, asked)
        agrees(report, tmp_path / name)


@pytest.mark.usefixtures("no_weight")
@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("W4A16", "rtn"), ("W4A16", "hqq"), ("W4A16", "gptq"), ("W4A16", "awq+rtn"),
        ("W4A16", "awq+gptq"), ("W4A16", "rotate+gptq"), ("W4A16", "signround"),
        ("W8A8", "smoothquant+gptq"), ("FP8_BLOCK", "gptq"), ("NVFP4", "awq+gptq"),
    ],
)  # fmt: skip
def test_no_weight_is_read(shallow: Path, story: Path, scheme: str, method: str) -> None:
    before = torch.get_rng_state()
    report = plan(shallow, recipe(scheme, method, story))
    assert report.foresight.time is not None and report.foresight.time.seconds > 0
    assert torch.equal(torch.get_rng_state(), before), "a run's own random numbers moved"


@pytest.mark.usefixtures("no_weight")
def test_costly_settings_are_seen(shallow: Path, story: Path) -> None:
    def parts(method: str, *settings: str, budget: float | None = None) -> dict[str, float]:
        asked = build_recipe(
            None, {"scheme": "W4A16", "method": method}, {},
            {"source": str(story), "samples": 4, "seq_len": 32}, {"dtype": "float32"},
            settings=settings, budget=budget,
        )  # fmt: skip
        time = plan(shallow, asked).foresight.time
        assert time is not None
        return time.parts

    assert "sensitivity" in parts("gptq", budget=4.0) and "sensitivity" in parts("rtn", budget=4.0)
    grid = parts("awq+rtn", "awq.search=grid", "awq.n_grid=500")
    assert grid["awq"] > 2 * parts("awq+rtn", "awq.search=grid", "awq.n_grid=5")["awq"]
    refined = parts("gptq", "gptq.refine_rounds=200")
    assert refined["gptq"] > 2 * parts("gptq")["gptq"]


def test_every_family_is_timed_by_its_own_layers(
    tmp_path: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("gemma3", "opt", "gpt_neox", "phi3"):
        folder = save_tiny(tmp_path / family, FAMILIES[family]())
        with monkeypatch.context() as patched:
            patched.setattr(Shards, "get", lambda *_: pytest.fail("a weight was read"))
            report = plan(folder, recipe(method="gptq", text=story))
        assert report.foresight.note == "", family
        assert report.foresight.time is not None
        assert report.foresight.time.parts["forward passes"] > 0


def test_unlike_peers_are_named_with_a_remedy(shallow: Path) -> None:
    report = plan(shallow, recipe(ignore=["re:.*q_proj"]), timed=False)
    assert len(report.peers) == 2  # one a layer
    schemes = dict(zip(report.peers[0].modules, report.peers[0].schemes, strict=True))
    left = [name.rpartition(".")[2] for name, scheme in schemes.items() if scheme is None]
    assert len(schemes) == 3 and left == ["q_proj"]
    advice = next(a for a in report.advice if "one linear" in a.trouble)
    assert "2 k_proj + q_proj + v_proj" in advice.trouble and "ignore" in advice.remedy
    alike = plan(shallow, recipe(ignore=["re:.*self_attn.*"]), timed=False)
    assert alike.peers == []


def test_experts_of_one_layer_are_peers(mixtral: Path) -> None:
    report = plan(mixtral, recipe(ignore=["re:.*layers.0.*experts.3.*"]), timed=False)
    assert len(report.peers) == 1 and len(report.peers[0].modules) == 3 * moe_models.EXPERTS
    experts = [m for m in report.modules if ".experts." in m.name and m.vllm is not None]
    assert all("MoE" in name for m in experts for name in m.vllm.declined)  # type: ignore[union-attr]


def test_a_tied_head_is_counted_and_said(shallow: Path, untied: Path) -> None:
    report = plan(shallow, recipe(), timed=False)
    embedding = Shards(shallow).info["model.embed_tokens.weight"]
    assert report.tied_bytes == embedding.nbytes
    assert any("output head" in a.trouble for a in report.advice)
    assert plan(untied, recipe(), timed=False).tied_bytes == 0
    turned = plan(shallow, recipe(method="rotate+rtn"), timed=False)
    assert turned.tied_bytes == 0  # the rotation gives it a head


def test_devices_that_cannot_share_are_said_with_a_group_size_that_could(shallow: Path) -> None:
    report = plan(shallow, recipe(group_size=32), timed=False)
    down = next(m for m in report.modules if m.name.endswith("down_proj"))  # 96 columns
    assert down.role == "row"
    assert down.cuts[2] == "48 input columns a device cut groups of 32"
    assert not report.devices()[2]
    advice = next(a for a in report.advice if "down_proj" in a.trouble and "share" in a.trouble)
    assert "--group-size 16 for 2 devices" in advice.remedy
    channel = plan(shallow, recipe("W8A16"), timed=False)
    assert channel.devices()[2] and channel.devices()[FOUR_DEVICES]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_what_a_run_refuses_a_plan_refuses_in_its_words(
    shallow: Path, story: Path, tmp_path: Path, method: str
) -> None:
    (tmp_path / "taken").mkdir()
    long = replace(recipe(method="gptq", text=story).calibration, seq_len=100_000)
    for asked, out in (
        (recipe(method=method, text=story, group_size=48), tmp_path / "out"),
        (recipe(method=method, text=story, targets=["re:.*nothing"]), tmp_path / "out"),
        (recipe(method=method, text=story), tmp_path / "taken"),
        (recipe(method=method, text=story), shallow / "inside"),
        (replace(recipe(method="gptq", text=story), calibration=long), tmp_path / "out"),
        (recipe(method=method, text=story, targets=["lm_head"]), tmp_path / "out"),
        (recipe(method="gptq", text=tmp_path / "nonsuch.txt"), tmp_path / "out"),
    ):
        with pytest.raises(UserError) as planned:
            plan(shallow, asked, out, timed=False)
        with pytest.raises(UserError) as ran:
            run(shallow, out, asked)
        assert str(planned.value) == str(ran.value)


def test_a_full_disk_is_refused_before_the_run_begins(
    shallow: Path, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.quantize.planning.foresee.free_disk_bytes", lambda _: 1000)
    for method in ("rtn", "gptq"):
        asked = recipe(method=method, text=story)
        for start in (lambda out, r: plan(shallow, r, out, timed=False),
                      lambda out, r: run(shallow, out, r)):  # fmt: skip
            with pytest.raises(UserError, match="has 0.0 MB free, but the run needs"):
                start(tmp_path / "out", asked)
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_the_options_of_run(
    command: Commands, shallow: Path, calibration: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    planned = command(
        "plan", shallow, "-o", out, "--group-size", "32", "--method", "gptq", *calibration, "--json"
    )
    assert planned.code == 0, planned.stderr
    facts = json.loads(planned.stdout)
    assert not out.exists()
    assert facts["format"] == "compressed-tensors" and facts["streamed"] is False
    assert facts["recipe"]["passes"][0]["group_size"] == 32
    assert len(facts["modules"]) == 14
    first = facts["modules"][0]
    assert first["name"] == "model.layers.0.mlp.down_proj"
    assert first["scheme"] == "int4 symmetric, Group(size=32)"
    assert set(first["cuts"]) == {"2", "4", "8"}
    assert first["lowbit"]["runs"] and first["llama_cpp"]["declined"]["Q4_K"]
    assert facts["time"]["seconds"] > 0 and facts["memory"]["host"] > 0
    shown = command("plan", shallow, "--method", "rtn", "--no-timing")
    assert shown.code == 0, shown.stderr
    for part in (
        "layers.*.mlp.down_proj",
        "int4 symmetric",
        "bits per weight",
        "peak memory",
        "devices",
    ):
        assert part in shown.stdout
    assert "about" not in shown.stdout.split("disk")[1].split("tensor parallel")[0]


def test_where_no_files_are_kept_room_is_not_what_is_missing(shallow: Path, story: Path) -> None:
    proc = Path("/proc")
    if not proc.is_dir():
        pytest.skip("this system has no /proc")
    for method in ("rtn", "gptq"):
        asked = recipe(method=method, text=story)
        for start in (lambda r: plan(shallow, r, proc / "x", timed=False),
                      lambda r: run(shallow, proc / "x", r)):  # fmt: skip
            with pytest.raises(UserError, match="/proc is no(t writable| place to write files)"):
                start(asked)


def test_the_run_says_what_it_will_take_before_it_begins(
    tmp_path: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.quantize.planning.foresee.WORTH_TIMING", 0)
    folder = deep_llama(tmp_path / "model", layers=2)
    for method in ("rtn", "gptq"):
        said: list[str] = []
        run(folder, tmp_path / method, recipe(method=method, text=story), say=said.append)
        assert said[-1].startswith("about ") and " on this machine, output " in said[-1]
        assert "peak memory about" in said[-1]


def test_a_run_that_goes_on_says_what_the_rest_takes(
    tmp_path: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.quantize.planning.foresee.WORTH_TIMING", 0)
    folder = deep_llama(tmp_path / "model", layers=2)
    chosen = recipe(method="gptq", text=story)
    write = Journal.write

    def stop(journal: Journal, layer: str, *args: Any) -> None:
        write(journal, layer, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "write", stop)
        run(folder, tmp_path / "out", chosen)
    said: list[str] = []
    result = run(folder, tmp_path / "out", chosen, say=said.append)
    assert result.resumed_layers == 1
    assert any(s.startswith("about ") and " for what is left on this machine" in s for s in said)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_run_names_fused_peers_that_differ(method: str, tmp_path: Path, story: Path) -> None:
    folder = deep_llama(tmp_path / "model", layers=2)
    chosen = recipe(method=method, text=story)
    one = replace(chosen.weight_passes[0], targets=("re:.*q_proj", "re:.*o_proj"))
    said: list[str] = []
    run(folder, tmp_path / "out", replace(chosen, passes=(one,)), say=said.append)
    (told,) = [s for s in said if "vLLM refuses" in s]
    assert all(leaf in told for leaf in ("q_proj", "k_proj", "v_proj")) and "o_proj" not in told
    said.clear()
    run(folder, tmp_path / "all", chosen, say=said.append)
    assert not any("vLLM refuses" in s for s in said)


def test_an_unknown_head_count_does_not_stop_a_plan(tmp_path: Path) -> None:
    folder = deep_llama(tmp_path / "model", layers=1)
    change_json(folder / "config.json", lambda c: c.pop("num_key_value_heads"))
    change_json(folder / "config.json", lambda c: c.pop("num_attention_heads"))
    report = plan(folder, recipe(), timed=False)
    queries = next(m for m in report.modules if m.name.endswith("q_proj"))
    assert queries.role == "column" and queries.cuts[2] is None
