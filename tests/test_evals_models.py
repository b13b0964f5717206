"""Scorers for every kind of folder, sizes, speed, and reports that carry their protocol."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.text import Text, load_text, load_tokenizer
from lowbit.evals import speed
from lowbit.evals.divergence import divergence
from lowbit.evals.linears import linear_results
from lowbit.evals.measure import measure_models, text_ids
from lowbit.evals.perplexity import perplexity
from lowbit.evals.protocols import plan_windowing
from lowbit.evals.report import Report
from lowbit.evals.scorer import context_limit, load_scorer
from lowbit.evals.size import size_report
from lowbit.evals.speed import SpeedPlan, decode_speed_apart
from lowbit.evals.windows import Windowing, cut_windows
from lowbit.kernels.errors import UserError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

MATRICES = 5 * (
    64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 172
)  # q, k and v, o, the MLP of 5 layers
EMBEDDING, NORMS = 512 * 64, 11 * 64


@pytest.fixture(scope="module")
def original() -> Path:
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained model to measure")
    return Path(folder) / "stories260k"


@pytest.fixture(scope="module")
def quantized(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with the model rounded to a scheme, by the code behind `quantize run`."""
    from lowbit.quantize.recipe import Recipe, WeightPass
    from lowbit.quantize.runner import quantize_model

    root = tmp_path_factory.mktemp("quantized")

    def make(scheme: str, group_size: int) -> Path:
        out = root / f"{scheme}-{group_size}"
        if not out.exists():
            weights = WeightPass(
                method="rtn", scheme=scheme, group_size=group_size, ignore=("re:.*down_proj",)
            )
            quantize_model(original, out, Recipe(passes=(weights,)))
        return out

    return make


@pytest.fixture(scope="module")
def stories(original: Path) -> Text:
    return load_text(str(original.parent / "text" / "tinystories_valid.txt"), "evaluation")


@pytest.mark.parametrize(
    ("scheme", "group_size"), [("W4A16", 32), ("W4A16_ASYM", 64), ("W3A16", 32), ("W8A16", -1)]
)
def test_our_reader_scores_as_compressed_tensors_does(
    quantized: Callable[..., Path], scheme: str, group_size: int
) -> None:
    pytest.importorskip("compressed_tensors", reason="the package that is compared with")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = quantized(scheme, group_size)
    ids = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(0))
    # compressed-tensors 0.20.1 takes packed zero-points only on this way of loading
    asymmetric = CompressedTensorsConfig(dequantize=True) if "ASYM" in scheme else None
    options = {} if asymmetric is None else {"quantization_config": asymmetric}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        want = theirs(ids).logits[0]
    assert (load_scorer(folder)(ids) - want).abs().max() < 1e-3


def test_our_checkpoints_need_no_other_package(
    quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)  # an import of it fails
    assert load_scorer(quantized("W4A16", 32)).dtype == torch.float32


def test_tied_embeddings_stay_tied(quantized: Callable[..., Path]) -> None:
    model = load_scorer(quantized("W4A16", 32)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_more_bits_diverge_less(
    original: Path, quantized: Callable[..., Path], stories: Text
) -> None:
    ids = load_tokenizer(original)(stories.text[:3000], return_tensors="pt").input_ids[0]
    windows = cut_windows(ids, Windowing(128, 128, windows=3), None)
    base = load_scorer(original)
    bits = ("W8A16", -1), ("W4A16", 32), ("W3A16", 32)
    klds = [divergence(base, load_scorer(quantized(*b)), windows).kld_mean for b in bits]
    assert 0 < klds[0] < klds[1] < klds[2]


def with_group(folder: Path, to: Path, **changes: object) -> Path:
    """A copy of a checkpoint with `changes` in its first config group."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    next(iter(config["quantization_config"]["config_groups"].values())).update(changes)
    (to / "config.json").write_text(json.dumps(config))
    return to


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


def test_activations_that_are_quantized_are_not_ignored(
    quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """Dequantized weights alone would measure a better model than the checkpoint is."""
    pytest.importorskip("compressed_tensors", reason="the package that quantizes activations")
    folder = with_group(quantized("W8A16", -1), tmp_path / "w8a8", input_activations=TOKENS)
    ids = torch.arange(20)[None]
    got = load_scorer(folder)(ids)
    assert (got - load_scorer(quantized("W8A16", -1))(ids)).abs().max() > 1e-3
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (got - theirs(input_ids=ids).logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changes",
    [{"input_activations": {**TOKENS, "symmetric": False}}, {"output_activations": TOKENS}],
    ids=["zero-points", "outputs"],
)
def test_what_is_not_computed_here_goes_through_transformers(
    quantized: Callable[..., Path],
    tmp_path: Path,
    changes: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("compressed_tensors", reason="the package that quantizes activations")
    folder = with_group(quantized("W8A16", -1), tmp_path / "other", **changes)
    monkeypatch.setattr(
        "lowbit.evals.scorer._load_dequantized", lambda *a: pytest.fail("part was ignored")
    )
    assert load_scorer(folder)(torch.arange(20)[None]).isfinite().all()


def test_auto_is_float32_on_a_cpu_and_dtypes_are_checked(original: Path) -> None:
    assert load_scorer(original).dtype == torch.float32
    assert load_scorer(original, "bfloat16").dtype == torch.bfloat16
    with pytest.raises(UserError, match="auto or one of float32, bfloat16, float16, got 'int8'"):
        load_scorer(original, "int8")


def broken_copy(original: Path, folder: Path, what: str) -> Path:
    shutil.copytree(original, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    settings = json.loads(config.read_text())
    if what == "a missing tensor":
        tensors = load_file(weights)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, weights)
    elif what == "a tensor of another shape":
        tensors = load_file(weights)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 64)
        save_file(tensors, weights)
    elif what == "a truncated file":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif what == "no config":
        config.unlink()
    elif what == "not a causal LM":
        config.write_text(json.dumps({**settings, "model_type": "clip_vision_model"}))
    elif what == "an unknown quantization":
        config.write_text(
            json.dumps({**settings, "quantization_config": {"quant_method": "rot13"}})
        )
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a missing tensor", "lacks 1 of the model's weights, first 'model.layers.2.mlp.up_proj"),
        ("a tensor of another shape", "transformers cannot load .*mismatch"),
        ("a truncated file", "truncated or damaged"),
        ("no config", "no config.json"),
        ("not a causal LM", "not a causal language model"),
        ("an unknown quantization", "'rot13', which transformers does not read"),
    ],
)
def test_broken_models_are_refused(original: Path, tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_scorer(broken_copy(original, tmp_path / "broken", what))


def test_sizes_count_every_bit(original: Path, quantized: Callable[..., Path]) -> None:
    size = size_report(original)
    stored = load_file(original / "model.safetensors").values()
    assert size.tensor_bytes == sum(t.nbytes for t in stored)
    assert size.file_bytes == (original / "model.safetensors").stat().st_size
    assert size.weights == MATRICES + EMBEDDING + NORMS
    assert (size.bits_per_weight, size.quantized_bits_per_weight) == (32.0, None)

    down = 5 * 64 * 172
    small = size_report(quantized("W4A16", 32))
    assert small.weights == size.weights
    assert small.quantized_weights == MATRICES - down
    shapes = 6 * 5 * 2 * 64  # two int64 for each linear
    scales = 32 // 32  # bits of a float32 scale for each weight of a group of 32
    assert small.quantized_bits_per_weight == 4 + scales + shapes / (MATRICES - down)
    unquantized = 32 * (down + EMBEDDING + NORMS)
    assert small.bits_per_weight == pytest.approx(
        (small.quantized_bits_per_weight * (MATRICES - down) + unquantized) / size.weights
    )


def test_layouts_that_are_not_read_still_have_bytes(original: Path, tmp_path: Path) -> None:
    folder = broken_copy(original, tmp_path / "other", "an unknown quantization")
    size = size_report(folder)
    assert size.file_bytes == size_report(original).file_bytes
    assert size[2:] == (None, None, None, None)


def test_context_beyond_the_model_is_refused(
    original: Path, quantized: Callable[..., Path]
) -> None:
    assert context_limit(original) == 512
    assert plan_windowing([original]) == Windowing(512, 512, "none", 10)
    assert plan_windowing([original], 256, 64, "first", 3) == Windowing(256, 64, "first", 3)
    with pytest.raises(UserError, match="ctx 513 exceeds the 512 positions of .*stories260k"):
        plan_windowing([original, quantized("W4A16", 32)], 513)


@pytest.fixture(scope="module")
def report(original: Path, quantized: Callable[..., Path], stories: Text) -> Report:
    models = {"original": original, "w4": quantized("W4A16", 32), "w3": quantized("W3A16", 32)}
    plan = SpeedPlan([1, 403, 407], new_tokens=8, repeats=3, threads=1)
    windowing = Windowing(128, 128, windows=3)
    return measure_models(models, stories, windowing, base="original", speed=plan, noise_floor=True)


def test_one_pass_measures_what_single_ones_do(
    report: Report, original: Path, quantized: Callable[..., Path], stories: Text
) -> None:
    ids = load_tokenizer(original)(
        stories.text[:9000], add_special_tokens=False, return_tensors="pt"
    ).input_ids[0]
    windows = cut_windows(ids, report.protocol.windowing, None)
    base, w3 = load_scorer(original), load_scorer(quantized("W3A16", 32))
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["original", "w4", "w3"]
    assert rows["original"].perplexity == perplexity(base, windows)
    assert rows["original"].divergence is None
    assert rows["w3"].perplexity == perplexity(w3, windows)
    assert rows["w3"].divergence == divergence(base, w3, windows)
    assert rows["w3"].size == size_report(quantized("W3A16", 32))


def test_speed_is_measured_apart(report: Report) -> None:
    for row in report.rows:
        s = row.speed
        assert s is not None
        assert 0 < s.decode_min <= s.decode <= s.decode_max
        assert (s.prompt_tokens, s.new_tokens, s.repeats) == (3, 8, 3)
        assert s.prefill > 0 and s.peak_device_memory is None
        assert sum(s.kernels.values()) == (0 if row.name == "original" else 30)


def test_the_noise_floor_is_the_bases_in_bfloat16(
    original: Path, quantized: Callable[..., Path], stories: Text
) -> None:
    models, windowing = {"original": original}, Windowing(128, 128, windows=2)
    found = measure_models(models, stories, windowing, base="original", noise_floor=True)
    ids = text_ids(stories.text, load_tokenizer(original), windowing)
    windows = cut_windows(ids, windowing, None)
    want = divergence(load_scorer(original), load_scorer(original, "bfloat16"), windows)
    assert found.noise_floor == want and 0 < want.kld_mean < 0.01
    assert [row.name for row in found.rows] == ["original"]
    assert f"noise floor: KLD {want.kld_mean:.6f}" in found.to_markdown()
    with pytest.raises(UserError, match="name it with --base"):
        measure_models(models, stories, windowing, noise_floor=True)
    with pytest.raises(UserError, match="it is measured in bfloat16; give --dtype float32"):
        measure_models(models, stories, windowing, base="original", dtype="bfloat16",
                       noise_floor=True)  # fmt: skip


def test_linears_carry_their_bits_and_errors(original: Path, tmp_path: Path) -> None:
    from lowbit.quantize.recipe import Calibration, Recipe, WeightPass
    from lowbit.quantize.runner import quantize_model

    text = original.parent / "text" / "tinystories_valid.txt"
    weights = WeightPass(method="gptq", scheme="W4A16", group_size=32, ignore=("re:.*down_proj",))
    rows = Calibration(source=str(text), samples=4, seq_len=64)
    made = quantize_model(original, tmp_path / "w4", Recipe((weights,), calibration=rows))
    found = linear_results(made.out)
    assert found is not None and len(found) == 6 * 5
    assert {r.name: r.relative_error for r in found} == made.relative_error
    assert all(r.method == "gptq" for r in found)
    q = next(r for r in found if r.name == "model.layers.0.self_attn.q_proj")
    assert q.bits == 4 + 1 + 2 * 64 / (64 * 64), "codes, a float32 scale of 32, two int64"
    (made.out / "quantization_report.json").unlink()
    bare = linear_results(made.out)
    assert bare is not None and [r.bits for r in bare] == [r.bits for r in found]
    assert {r.relative_error for r in bare} == {None}
    assert linear_results(original) is None


def test_json_holds_the_whole_protocol(report: Report, stories: Text) -> None:
    parsed = json.loads(report.to_json())
    protocol = parsed["protocol"]
    assert protocol["text_sha256"] == stories.sha256
    assert protocol["windowing"] == {
        "ctx": 128,
        "stride": 128,
        "bos": "none",
        "windows": 3,
        "skip": 0,
        "predictive": False,
        "tail": False,
        "special": False,
    }
    assert (protocol["windows"], protocol["scored_tokens"], protocol["positions"]) == (3, 381, 384)
    assert (protocol["base"], protocol["dtype"], protocol["seed"]) == ("original", "float32", None)
    versions = parsed["environment"]["packages"]
    assert versions["torch"] == torch.__version__ and {"transformers", "lowbit"} <= set(versions)
    assert parsed["environment"]["cpu"] and parsed["environment"]["threads"] >= 1
    rows = parsed["rows"]
    assert rows[1]["divergence"]["kld_mean"] == report.rows[1].divergence.kld_mean  # type: ignore[union-attr]
    assert rows[0]["divergence"] is None
    assert rows[2]["size"]["file_bytes"] == report.rows[2].size.file_bytes


def test_markdown_holds_the_whole_protocol(report: Report, stories: Text) -> None:
    table, _, notes = report.to_markdown().partition("\n\n")
    header, rule, *rows = table.splitlines()
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1 and len(rows) == 3
    assert rows[1].startswith("| w4 | ") and "tokens/s" in header
    kld = report.rows[1].divergence
    assert kld is not None and f"{kld.kld_mean:.5f} ± {kld.kld_mean_stderr:.5f}" in rows[1]
    for word in (
        stories.sha256, "3 of ctx 128, stride 128, skip 0, BOS none", "381 tokens scored",
        "dtype float32, device cpu", f"torch {torch.__version__}", "lowbit 0.1.0", "seed: none",
        "original: ", "(base)", report.environment.cpu, "8 new tokens", "KL(base || model)",
    ):  # fmt: skip
        assert word in notes, word


def test_columns_that_nothing_fills_are_left_out(original: Path, stories: Text) -> None:
    alone = measure_models({"it": original}, stories, Windowing(64, 64, windows=1))
    header = alone.to_markdown().splitlines()[0]
    assert header == "| model | perplexity | weights file, MB | bits/weight, linears / whole |"
    assert alone.rows[0].perplexity.nll_stderr is None
    assert json.loads(alone.to_json())["rows"][0]["speed"] is None


def test_an_infinite_perplexity_is_still_json(report: Report) -> None:
    row = report.rows[0]
    lost = row._replace(perplexity=row.perplexity._replace(perplexity=math.inf))
    changed = Report(report.protocol, report.environment, [lost], 0.0)
    assert json.loads(changed.to_json())["rows"][0]["perplexity"]["perplexity"] is None
    assert "| inf " in changed.to_markdown()


def test_a_prompt_that_leaves_no_room_is_refused_in_the_other_process(original: Path) -> None:
    with pytest.raises(UserError, match="asks for 64 new tokens, but .* has room for 12"):
        decode_speed_apart(original, SpeedPlan([1] * 500))


def test_a_killed_measurement_says_so(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "CHILD", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="killed by signal 9"):
        decode_speed_apart(original, SpeedPlan([1]))
    monkeypatch.setattr(speed, "CHILD", "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="exit code 3"):
        decode_speed_apart(original, SpeedPlan([1]))


def test_peak_memory_of_the_other_process_is_its_own(original: Path) -> None:
    plan = SpeedPlan([1], new_tokens=2, repeats=1)
    before = decode_speed_apart(original, plan).peak_memory
    ballast = torch.ones(2**28)  # 1 GiB, resident here
    after = decode_speed_apart(original, plan).peak_memory
    assert ballast.numel() == 2**28
    assert 100 * 2**20 < after < before + 300 * 2**20


def test_a_folder_beside_us_cannot_shadow_a_package(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    got: Any = decode_speed_apart(original, SpeedPlan([1], new_tokens=2, repeats=1))
    assert got.decode > 0
