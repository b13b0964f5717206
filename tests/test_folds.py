"""Folds are found by structure, leave every family's layers as they compute, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.model import LayerCall, LayeredModel, forward_layer
from lowbit.calib.stops import first_row
from lowbit.quantize.fold_search import find_folds
from lowbit.quantize.folds import Fold, NoFold, apply_fold, powers_of_two
from lowbit.quantize.layer_weights import LayerWeights
from torch import Tensor, nn
from transformers import OPTConfig

from .models import change_tensors
from .runtime_models import _OPT, FAMILIES, save_tiny
from .test_families import TESTED, roughen, token_rows

NORM, VALUE = "input_layernorm", "v_proj"
LLAMA = {"q_proj": NORM, "o_proj": VALUE, "gate_proj": "post_attention_layernorm",
         "down_proj": "up_proj"}  # fmt: skip
FEEDERS: dict[str, dict[str, str | None]] = {  # first linear of a group -> what feeds it
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), LLAMA),
    "gemma3": {**LLAMA, "gate_proj": "pre_feedforward_layernorm"},
    "phi3": {"qkv_proj": NORM, "o_proj": "qkv_proj", "gate_up_proj": "post_attention_layernorm",
             "down_proj": "gate_up_proj"},
    "opt": {"q_proj": "self_attn_layer_norm", "out_proj": VALUE, "fc1": "final_layer_norm",
            "fc2": "fc1"},  # through a ReLU
    "gpt_neox": {"query_key_value": NORM, "dense": "query_key_value",
                 "dense_h_to_4h": "post_attention_layernorm", "dense_4h_to_h": None},
    "falcon": {"query_key_value": NORM, "dense": "query_key_value", "dense_4h_to_h": None},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a family's random model, made once; its tensors as `dtype`."""
    root = tmp_path_factory.mktemp("folds")

    def made(family: str, dtype: torch.dtype = torch.float32) -> Path:
        path = root / f"{family}-{dtype}"
        if not path.exists():
            save_tiny(path, TESTED[family](), tokenizer=False)
            change_tensors(path, roughen)
            change_tensors(path, lambda tensors: cast(tensors, dtype))
        return path

    return made


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name in tensors:
        tensors[name] = tensors[name].to(dtype)


@contextmanager
def loaded(folder: Path, layer: int = 0) -> Iterator[tuple[str, nn.Module, LayerCall, Any]]:
    """A layer by name, loaded in float32, what it is called with, and its weights."""
    model = LayeredModel(folder)
    name = list(model.layers)[layer]
    calls = model.layer_calls(token_rows(2), 2)[0]
    call = LayerCall(next(iter(calls.values())).hidden, calls[name].kwargs)
    with torch.inference_mode(), model.loaded(name) as module:
        yield name, module, call, LayerWeights(model, name, module)


def input_groups(name: str, layer: nn.Module, call: LayerCall) -> list[list[str]]:
    """Full names of the linears that share an input."""
    seen: dict[str, Tensor] = {}
    linears = {n: m for n, m in layer.named_modules(prefix=name) if isinstance(m, nn.Linear)}
    handles = [
        m.register_forward_pre_hook(lambda _, args, n=n: seen.update({n: args[0]}))
        for n, m in linears.items()
    ]
    forward_layer(layer, call)
    for handle in handles:
        handle.remove()
    groups: dict[int, list[str]] = {}
    for linear, x in seen.items():
        groups.setdefault(x.data_ptr(), []).append(linear)
    return list(groups.values())


def folds_of(name: str, layer: nn.Module, call: LayerCall) -> list[Fold | NoFold]:
    return find_folds(name, layer, input_groups(name, layer, call), first_row(call))


def random_scales(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(torch.randn(count, generator=generator))


def relative_change(layer: nn.Module, call: LayerCall, before: Tensor) -> float:
    own = before - call.hidden
    return float((forward_layer(layer, call) - before).norm() / own.norm())


@pytest.mark.parametrize("family", TESTED)
def test_every_family_folds_where_it_can_and_computes_the_same(
    family: str, folder: Callable[..., Path]
) -> None:
    with loaded(folder(family), layer=1) as (name, layer, call, weights):
        before = forward_layer(layer, call)
        folds = folds_of(name, layer, call)
        found = {
            f.readers[0].rpartition(".")[2]: f.feeder.rpartition(".")[2]
            if isinstance(f, Fold)
            else None
            for f in folds
        }
        assert found == FEEDERS[family]
        for i, fold in enumerate(folds):
            if isinstance(fold, Fold):
                apply_fold(fold, random_scales(len(fold.rows), i), weights, lambda _: True)
        assert set(weights.changed)
        assert relative_change(layer, call, before) < 2e-5


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_a_rounded_norm_is_made_up_for(family: str, folder: Callable[..., Path]) -> None:
    """Norms are stored in bfloat16: what the linears take is the ratio that really came about."""
    with loaded(folder(family, torch.bfloat16)) as (name, layer, call, weights):
        before = forward_layer(layer, call)
        fold = folds_of(name, layer, call)[0]
        assert isinstance(fold, Fold) and fold.added == (1.0 if family == "gemma3" else 0.0)
        scales = random_scales(len(fold.rows))
        applied = apply_fold(fold, scales, weights, lambda _: True)
        norm = weights.changed[f"{fold.feeder}.weight"]
        assert torch.equal(norm, norm.bfloat16().float())
        assert not torch.equal(applied, scales)
        assert torch.allclose(applied, scales, rtol=0.1)  # a gain near 1 + -1 is coarse
        assert relative_change(layer, call, before) < 2e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt", "falcon"])
def test_linears_that_stay_floats_move_by_powers_of_two(
    family: str, folder: Callable[..., Path]
) -> None:
    """So nothing is rounded, though all tensors are stored in bfloat16."""
    with loaded(folder(family, torch.bfloat16)) as (name, layer, call, weights):
        before = forward_layer(layer, call)
        for fold in folds_of(name, layer, call):
            if isinstance(fold, Fold):
                scales = random_scales(len(fold.rows))
                applied = apply_fold(fold, scales, weights, lambda linear: "v_proj" in linear)
                assert torch.equal(applied, powers_of_two(scales))
        for value in weights.changed.values():
            assert torch.equal(value, value.bfloat16().float())
        assert relative_change(layer, call, before) < 1e-5


def test_grouped_queries_share_the_scales_of_their_value_head(folder: Callable[..., Path]) -> None:
    with loaded(folder("llama")) as (name, layer, call, _):
        fold = folds_of(name, layer, call)[1]
    assert isinstance(fold, Fold)
    assert len(fold.rows) == 32  # two value heads of 16 for four query heads
    heads = [torch.arange(16), torch.arange(16), torch.arange(16, 32), torch.arange(16, 32)]
    assert torch.equal(fold.columns, torch.cat(heads))


def test_a_norm_whose_output_is_the_residual_is_refused(tmp_path: Path) -> None:
    config = OPTConfig(**{**_OPT, "do_layer_norm_before": False})
    with loaded(save_tiny(tmp_path / "model", config, tokenizer=False)) as (name, layer, call, _):
        folds = folds_of(name, layer, call)
    refused = {f.readers[0].rpartition(".")[2]: f.reason for f in folds if isinstance(f, NoFold)}
    assert "no norm" in refused["q_proj"]  # reads what enters the layer
    assert "changes what the layer computes" in refused["fc1"]
    assert {f.feeder.rpartition(".")[2] for f in folds if isinstance(f, Fold)} == {"v_proj", "fc1"}


class Gated(nn.Module):
    """A layer whose down projection reads act(gate) * up, or something that only looks like it."""

    def __init__(self, honest: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down, self.honest = nn.Linear(32, 16), honest

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        inner = torch.sigmoid(gate) * up
        if not self.honest:
            inner = torch.where(torch.arange(32) == 7, torch.tanh(up), inner)  # one channel
        return x + self.down(inner)


@pytest.mark.parametrize("honest", [True, False])
def test_one_channel_that_does_not_scale_spoils_a_fold(honest: bool) -> None:
    layer = Gated(honest)
    call = LayerCall(torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1)), {})
    with torch.inference_mode():
        [_, fold] = find_folds("layer", layer, [["layer.gate", "layer.up"], ["layer.down"]], call)
    assert isinstance(fold, Fold) == honest
    if isinstance(fold, Fold):
        assert fold.feeder == "layer.up" and fold.biased


def test_dead_gains_are_left_alone(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "model", FAMILIES["llama"](), tokenizer=False)

    def kill(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.input_layernorm.weight"][3] = 0

    change_tensors(path, kill)
    with loaded(path) as (name, layer, call, weights):
        before = forward_layer(layer, call)
        fold = folds_of(name, layer, call)[0]
        assert isinstance(fold, Fold)
        applied = apply_fold(fold, random_scales(64), weights, lambda _: True)
        assert applied[3] == 1 and bool(torch.isfinite(applied).all())
        assert relative_change(layer, call, before) < 2e-5
