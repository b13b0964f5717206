"""Mixtures of experts: split as the checkpoint names them, each calibrated on its own tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from lowbit.calib.expert_shards import by_expert, fuse_experts
from lowbit.calib.experts import routers, split_modules
from lowbit.calib.model import LayeredModel, forward_layer
from lowbit.calib.shards import Shards
from lowbit.calib.stops import find_stops
from lowbit.evals.scorer import load_scorer
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.journal import Journal
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.expert_calibration import dampened, why_rounded
from lowbit.quantize.fold_search import find_folds
from lowbit.quantize.folds import Fold, NoFold
from lowbit.quantize.linear_names import fused_peers
from lowbit.quantize.passes.gptq import factor_hessian, gptq_quantize
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.passes.settings import GPTQSettings, RTNSettings
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.recipe import Calibration, Execution, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model
from lowbit.quantize.spec import scheme_from_name
from lowbit.runtime.loader import load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Llama4TextConfig

from .models import SENTENCE, change_tensors, hashes
from .moe_models import EXPERTS, FAMILIES, STORED_FUSED, TOP_K
from .runtime_models import save_tiny

ROWS, SEQ = 6, 48
IDS = torch.arange(40).remainder(23).add(60).view(2, 20)
QUANTIZED = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe")
BIAS = "mlp.gate.e_score_correction_bias"


class Made(NamedTuple):
    """A model folder, the checkpoint made of it, and its report."""

    source: Path
    out: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by family. Not to be changed."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            place = tmp_path_factory.mktemp("moe") / family
            made[family] = save_tiny(place, FAMILIES[family]())
        return made[family]

    return get


@pytest.fixture(scope="module")
def quantized(
    folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Made]:
    """The W4A16 checkpoint of a family. Not to be changed."""
    made: dict[str, Made] = {}

    def get(family: str) -> Made:
        if family not in made:
            out = tmp_path_factory.mktemp("moe-w4") / family
            made[family] = quantize(folder(family), out)
        return made[family]

    return get


def quantize(
    source: Path,
    out: Path,
    weights: WeightPass | None = None,
    order: Literal["sequential", "parallel"] = "sequential",
    all_experts: bool = False,
) -> Made:
    """One quantizer (GPTQ where none is given) on ROWS rows of SEQ tokens."""
    text = source.parent / "text.txt"
    text.write_text(SENTENCE * 20)
    recipe = Recipe(
        (weights or WeightPass(),),
        Calibration(str(text), ROWS, SEQ, all_experts=all_experts),
        Execution(order, batch_size=4, dtype="float32"),
    )
    quantize_model(source, out, recipe, "cpu")
    return Made(source, out, json.loads((out / "quantization_report.json").read_text()))


def transformers_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def fake_quantized(source: Path, out: Path) -> Any:
    """transformers' own model of `source` with the dequantized weights of `out`, put in by hand."""
    model, checkpoint, layered = transformers_model(source), Checkpoint(out), LayeredModel(source)

    def dense(name: str) -> Tensor:
        return checkpoint.dense_weight(
            layered.tensor_name(f"{name}.weight").removesuffix(".weight")
        )

    for name, module in layered.model.named_modules():
        if isinstance(module, nn.Linear) and ".experts." not in name:
            model.get_submodule(name).weight.data = dense(name)
    for path, experts in split_modules(layered.model).items():
        fused = model.get_submodule(path)
        for e in range(EXPERTS):
            gate, up, down = (dense(f"{path}.{e}.{leaf}") for leaf in experts.names)
            if experts.concatenated:
                inner = torch.cat([gate, up])
            else:
                inner = torch.stack([gate, up], 1).flatten(0, 1)
            fused.gate_up_proj.data[e] = inner.T if experts.transposed else inner
            fused.down_proj.data[e] = down.T if experts.transposed else down
    return model


def test_split_experts_compute_what_transformers_does(folder: Callable[[str], Path]) -> None:
    for family in FAMILIES:
        model = LayeredModel(folder(family))
        model.check_shards()
        assert split_modules(model.model), family
        call = model.layer_calls(IDS, len(IDS))[0]
        hidden = next(iter(call.values())).hidden
        for name in model.layers:
            with torch.inference_mode(), model.loaded(name) as layer:
                hidden = forward_layer(layer, call[name]._replace(hidden=hidden))
        (last,) = model.head_inputs(IDS, [hidden])
        reference = transformers_model(folder(family))
        with torch.no_grad():
            expected = reference(IDS, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(last, expected, atol=1e-5, rtol=1e-5, msg=family)


def test_the_runtime_runs_unquantized_experts(folder: Callable[[str], Path]) -> None:
    for family in FAMILIES:
        model = load(folder(family), "cpu", "float32").model
        expected = logits(transformers_model(folder(family)))
        torch.testing.assert_close(logits(model), expected, atol=5e-5, rtol=1e-5, msg=family)


@pytest.mark.parametrize("family", QUANTIZED)
def test_no_expert_stays_unquantized(family: str, quantized: Callable[[str], Made]) -> None:
    source, out, report = quantized(family)
    model = LayeredModel(source)
    checkpoint = Checkpoint(out)
    for path, experts in split_modules(model.model).items():
        for expert in range(EXPERTS):
            for leaf in (*experts.names.inner, experts.names.down):
                name = f"{path}.{expert}.{leaf}"
                stored = model.tensor_name(f"{name}.weight").removesuffix(".weight")
                assert f"{stored}.weight_packed" in checkpoint.shards
                assert report["linears"][name]["tokens"] >= 0
                if experts.has_bias:
                    assert f"{stored}.bias" in checkpoint.shards
    assert not [n for n, i in checkpoint.shards.info.items() if len(i.shape) == 3]
    for router in routers(model.model):
        stored = model.tensor_name(f"{router}.weight").removesuffix(".weight")
        assert {router, stored} <= set(checkpoint.config["quantization_config"]["ignore"])
        kept = checkpoint.shards.get(f"{stored}.weight")
        assert torch.equal(kept, Shards(source).get(f"{stored}.weight"))


def test_tensors_are_named_as_in_the_original(quantized: Callable[[str], Made]) -> None:
    endings = {"weight_packed", "weight_scale", "weight_shape"}
    for family in ("mixtral", "qwen2_moe", "deepseek_v3"):
        source, out, _ = quantized(family)
        originals = {n.removesuffix(".weight") for n in Shards(source).names()}
        for name in Checkpoint(out).shards.names():
            module, _, ending = name.rpartition(".")
            assert (module if ending in endings else name.removesuffix(".weight")) in originals


@pytest.mark.parametrize("family", QUANTIZED)
def test_coverage_counts_every_choice_of_the_router(
    family: str, quantized: Callable[[str], Made]
) -> None:
    report = quantized(family).report
    paths = split_modules(LayeredModel(quantized(family).source).model)
    assert list(report["experts"]) == list(paths)
    for path, coverage in report["experts"].items():
        tokens = coverage["routed_tokens"]
        assert len(tokens) == EXPERTS and sum(tokens) == ROWS * SEQ * TOP_K
        for expert, count in enumerate(tokens):
            linears = {
                n: r for n, r in report["linears"].items() if n.startswith(f"{path}.{expert}.")
            }
            assert len(linears) == 3
            assert {r["tokens"] for r in linears.values()} == {count}


@pytest.mark.parametrize("family", QUANTIZED)
def test_runtime_and_evals_run_the_quantized_experts(
    family: str, quantized: Callable[[str], Made]
) -> None:
    source, out, _ = quantized(family)
    expected = logits(fake_quantized(source, out))
    torch.testing.assert_close(logits(load_scorer(out).model), expected, atol=1e-5, rtol=1e-5)
    loaded = load(out, "cpu", "float32")
    assert {r.module for r in loaded.linears} == set(quantized(family).report["linears"])
    torch.testing.assert_close(logits(loaded.model), expected, atol=2e-4, rtol=1e-4)


def test_transformers_reads_the_checkpoint(quantized: Callable[[str], Made]) -> None:
    for family in ("mixtral", "qwen2_moe"):
        source, out, _ = quantized(family)
        config = CompressedTensorsConfig(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, quantization_config=config
        ).eval()
        torch.testing.assert_close(
            logits(theirs), logits(fake_quantized(source, out)), atol=1e-4, rtol=1e-4, msg=family
        )


@pytest.mark.parametrize("order", ["sequential", "parallel"])
def test_an_expert_without_tokens_is_quantized_and_reported(
    order: Literal["sequential", "parallel"], tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "source", FAMILIES["deepseek_v3"]())
    never_choose(source, expert=3)
    report = quantize(source, tmp_path / "out", order=order).report
    coverage = report["experts"]["model.layers.1.mlp.experts"]
    assert coverage["routed_tokens"][3] == 0
    assert sum(coverage["routed_tokens"]) == ROWS * SEQ * TOP_K
    assert coverage["fallback"] == [3]
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        linear = report["linears"][f"model.layers.1.mlp.experts.3.{leaf}"]
        assert linear["method"] == "rtn" and "0 tokens" in linear["fallback"]
        assert report["linears"][f"model.layers.1.mlp.experts.0.{leaf}"]["method"] == "gptq"


def never_choose(source: Path, expert: int) -> None:
    """Let the router of the DeepSeek-V3 in `source` never choose this expert."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.1.{BIAS}"][expert] = -100.0

    change_tensors(source, change)


def test_every_token_can_be_shown_to_every_expert(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", FAMILIES["deepseek_v3"]())
    never_choose(source, expert=3)
    routed = quantize(source, tmp_path / "routed").report
    shown = quantize(source, tmp_path / "shown", all_experts=True).report
    assert shown["experts"]["model.layers.1.mlp.experts"]["fallback"] == []
    for report, tokens in ((routed, None), (shown, ROWS * SEQ)):
        for name, linear in report["linears"].items():
            if ".experts.3." in name:
                assert linear["tokens"] == (tokens or 0)
                assert linear["routed_tokens"] == 0
    before = {n: r for n, r in routed["linears"].items() if "layers.0" in n}
    assert before == {n: r for n, r in shown["linears"].items() if n in before}


@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_damping_by_tokens_keeps_gptq_ahead_of_rounding(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    mixing = torch.randn(64, 64, generator=generator) / 8 + torch.eye(64)
    seen = torch.randn(tokens, 64, generator=generator) @ mixing
    others = torch.randn(4096, 64, generator=generator) @ mixing
    weight = torch.randn(96, 64, generator=generator)
    spec = scheme_from_name("W4A16", 32).weights

    def error(q: Quantized) -> float:
        return float((others @ (q.dequantize() - weight).T).square().mean())

    def gptq(settings: GPTQSettings) -> float:
        factor = factor_hessian(seen.T @ seen / tokens, settings)
        return error(gptq_quantize(weight, factor, spec, torch.float32, settings).quantized)

    plain = GPTQSettings()
    rounded = error(rtn_quantize(weight, spec, torch.float32, RTNSettings("mse")))
    damped = gptq(dampened(plain, tokens, 64))
    assert damped < gptq(plain)
    assert damped < rounded
    assert why_rounded(tokens, 64) is None and why_rounded(3, 64) is not None


def test_stored_scales_of_inputs_cover_all_tokens(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", FAMILIES["deepseek_v3"]())
    never_choose(source, expert=3)
    _, out, report = quantize(source, tmp_path / "out", WeightPass(scheme="W8A8_STATIC"))
    assert report["recipe"]["calibration"]["all_experts"]
    shards = Checkpoint(out).shards
    scales = [shards.get(f"model.layers.1.mlp.experts.{e}.up_proj.input_scale") for e in (0, 3)]
    assert torch.equal(*scales) and scales[0] > 0
    assert shards.get("model.layers.1.mlp.experts.3.down_proj.input_scale") > 0


@pytest.mark.parametrize("family", ["mixtral", *STORED_FUSED])
def test_no_expert_stays_unquantized_without_data(
    family: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source, out, report = quantize(folder(family), tmp_path / "out", WeightPass(method="rtn"))
    model, checkpoint = LayeredModel(source), Checkpoint(out)
    linears = [
        model.tensor_name(f"{n}.weight").removesuffix(".weight")
        for n, m in model.model.named_modules()
        if isinstance(m, nn.Linear) and n != "lm_head"
    ]
    assert set(linears) == set(checkpoint.schemes)
    assert not [n for n, i in checkpoint.shards.info.items() if len(i.shape) == 3]
    expected = logits(fake_quantized(source, out))
    torch.testing.assert_close(logits(load_scorer(out).model), expected, atol=1e-5, rtol=1e-5)


def test_fused_projections_share_a_scale_without_data(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantize(folder(STORED_FUSED[0]), out, WeightPass("rtn", "NVFP4A16"))
    tensors = Shards(out)
    suffix = ".weight_global_scale"
    modules = [n.removesuffix(suffix) for n in tensors.names() if n.endswith(suffix)]
    groups = [g for g in fused_peers(modules) if len(g) > 1]
    assert len(groups) > EXPERTS
    for group in groups:
        assert len({float(tensors.get(n + suffix)) for n in group}) == 1, group


def test_scales_move_within_an_expert_and_not_past_a_router(folder: Callable[[str], Path]) -> None:
    model = LayeredModel(folder("qwen2_moe"))
    name = "model.layers.0"
    call = model.layer_calls(torch.arange(64)[None], 1)[0][name]
    with torch.inference_mode(), model.loaded(name) as layer:
        stops = find_stops(name, layer, call, lambda linear: "mlp" in linear)
        groups = [list(group) for stop in stops for group in stop.groups]
        assert len(groups) == 2 + 2 * EXPERTS
        folds = dict(zip(map(tuple, groups), find_folds(name, layer, groups, call), strict=True))
    for group, fold in folds.items():
        if group[0].endswith("down_proj"):
            assert isinstance(fold, Fold), fold
            assert fold.feeder == group[0].replace("down_proj", "up_proj")
        else:
            assert isinstance(fold, NoFold)


def test_a_killed_run_ends_in_the_same_bytes(
    quantized: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, unbroken, _ = quantized("qwen2_moe")
    write = Journal.write

    def killed(self: Journal, layer: str, *args: Any) -> None:
        if layer.endswith(".1"):
            raise KeyboardInterrupt
        write(self, layer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "out")
    assert hashes(quantize(source, tmp_path / "out").out) == hashes(unbroken)


def test_fused_and_split_tensors_are_inverses(folder: Callable[[str], Path]) -> None:
    for family in ("mixtral", *STORED_FUSED):
        model = LayeredModel(folder(family))
        tensors = {n: model.shards.get(n) for n in model.shards.names()}
        fused = fuse_experts(model.model, tensors)
        for name, value in transformers_model(folder(family)).state_dict().items():
            if ".experts." in name:
                assert torch.equal(fused[name], value), name
        path, experts = next(iter(split_modules(model.model).items()))
        del tensors[model.tensor_name(f"{path}.0.{experts.names.up}.weight")]
        with pytest.raises(UserError, match="holds no tensor"):
            fuse_experts(model.model, tensors)
    plain = Shards(folder("mixtral"))
    assert by_expert(LayeredModel(folder("mixtral")).model, plain) is plain


def test_experts_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_local_experts=2,
    )  # fmt: skip
    save_tiny(tmp_path / "llama4", config, tokenizer=False)
    with pytest.raises(UserError, match="experts.gate_up_proj.*cannot take apart"):
        LayeredModel(tmp_path / "llama4")
