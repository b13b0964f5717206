"""Every family of models: the loop computes what transformers does, and its checkpoints load there.

Biases and norms are random too: at their initial values (0, 1) a mistake with them would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.causal_attention import use_causal_blocks
from lowbit.calib.layer_loop import Order, run_layers
from lowbit.calib.layer_worker import InputGroup, LayerWorker
from lowbit.calib.model import LayeredModel
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.journal import Journal
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.recipe import Calibration, Execution, Recipe, WeightPass
from lowbit.quantize.runner import RunResult, quantize_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FalconConfig

from .models import change_tensors, hashes
from .runtime_models import FAMILIES, VOCAB, fake_quantized, save_tiny

ORDERS: tuple[Order, ...] = ("sequential", "parallel")
TESTED = {
    **FAMILIES,
    "falcon": lambda: FalconConfig(  # its linears are a subclass of nn.Linear
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3, bos_token_id=256, eos_token_id=257,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for each other on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's random model, made once."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            save_tiny(root / family, TESTED[family]())
            change_tensors(root / family, roughen)
        return root / family

    return folder


def roughen(tensors: dict[str, Tensor]) -> None:
    noise = torch.Generator().manual_seed(1)
    for name in sorted(tensors):
        if tensors[name].ndim == 1:
            tensors[name] += 0.2 * torch.randn(tensors[name].shape, generator=noise)


def token_rows(count: int = 5, seq_len: int = 24) -> Tensor:
    """Longer than the sliding windows (8), not a multiple of the batch size (2)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCAB - 16, (count, seq_len), generator=generator)


class Onlooker(LayerWorker):
    """A worker that changes nothing and keeps what it is handed."""

    needs = frozenset({"hessian"})

    def __init__(self) -> None:
        self.hessians: dict[str, Tensor] = {}
        self.groups: list[set[str]] = []
        self.dropped: list[int] = []

    def wants(self, name: str) -> bool:
        return True

    def quantize(self, group: InputGroup) -> None:
        self.groups.append(set(group.linears))
        self.hessians |= {n: group.statistics["hessian"].mean() for n in group.linears}

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        self.dropped = dropped

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        return False


@contextmanager
def outputs_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Everything that each module returns while the context is open."""
    seen: dict[str, list[Tensor]] = {name: [] for name in modules}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            seen[name].append(output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def unread_outputs(model: LayeredModel) -> set[str]:
    """The layer after which nothing follows that is to be quantized: sequential order need not
    finish its forward pass."""
    return set() if model.head is not None else {list(model.layers)[-1]}


def whole_forward(
    folder: Path, dtype: torch.dtype, rows: Tensor, layers: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """transformers' own, but for the loop's attention in bfloat16 (test_causal_attention.py):
    output of each decoder layer, Hessian of each linear's input."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if dtype == torch.bfloat16:
        use_causal_blocks(model)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    inputs: dict[str, Tensor] = {}
    for name, module in linears.items():
        module.register_forward_pre_hook(
            lambda _, args, name=name: inputs.update({name: args[0].flatten(0, -2).double()})
        )
    with outputs_of({n: model.get_submodule(n) for n in layers}) as seen, torch.inference_mode():
        model(input_ids=rows, use_cache=False)
    hessians = {n: (x.T @ x / len(x)).float() for n, x in inputs.items()}
    return {name: outputs[0] for name, outputs in seen.items()}, hessians


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", TESTED)
def test_the_loop_equals_a_whole_forward(
    family: str, order: Order, originals: Callable[[str], Path]
) -> None:
    folder, rows = originals(family), token_rows()
    model, onlooker = LayeredModel(folder), Onlooker()
    with outputs_of(model.layers) as seen:
        run_layers(model, rows, onlooker, order, batch_size=2)
    states, hessians = whole_forward(folder, torch.float32, rows, list(model.layers))
    unread = unread_outputs(model) if order == "sequential" else set()
    for name, expected in states.items():
        if name in unread:
            assert len(torch.cat(seen[name])) == 1, "more than the row that shows shared inputs"
            continue
        got = torch.cat(seen[name])[-len(rows) :]  # earlier calls found shared inputs
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    heads = set(hessians) - set(onlooker.hessians)
    assert heads <= {"lm_head"} and (model.head is None) == bool(heads)
    for name, got in onlooker.hessians.items():
        expected = hessians[name]
        worst = float((got - expected).abs().max() / expected.abs().max())
        assert worst < 1e-4, (name, worst)
    assert onlooker.dropped == []
    assert all(p.is_meta for p in model.model.parameters()), "weights were left in memory"


@pytest.mark.parametrize("family", TESTED)
def test_the_loop_in_bfloat16(family: str, originals: Callable[[str], Path]) -> None:
    """Constants that a model computes for itself (rotary, embedding scales) round as transformers
    rounds them: the same operations on the same batch give the same bits."""
    folder, rows = originals(family), token_rows()
    model = LayeredModel(folder, torch.bfloat16)
    with outputs_of(model.layers) as seen:
        run_layers(model, rows, Onlooker(), "sequential")
    states, _ = whole_forward(folder, torch.bfloat16, rows, list(model.layers))
    for name in states.keys() - unread_outputs(model):
        assert torch.equal(seen[name][-1], states[name]), name


SHARED = {
    "llama": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "phi3": [{"qkv_proj"}, {"o_proj"}, {"gate_up_proj"}, {"down_proj"}],
    "opt": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
    "gpt_neox": [{"query_key_value"}, {"dense"}, {"dense_h_to_4h"}, {"dense_4h_to_h"}],
    "falcon": [{"query_key_value", "dense_h_to_4h"}, {"dense"}, {"dense_4h_to_h"}],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", SHARED)
def test_linears_that_share_an_input_share_its_hessian(
    family: str, order: Order, originals: Callable[[str], Path]
) -> None:
    model, onlooker = LayeredModel(originals(family)), Onlooker()
    run_layers(model, token_rows(), onlooker, order, batch_size=2)
    layers = len(model.layers)
    groups = [{name.rpartition(".")[2] for name in g} for g in onlooker.groups]
    groups = [g for g in groups if g != {"lm_head"}]
    expected = SHARED[family] * layers
    assert sorted(map(sorted, groups)) == sorted(map(sorted, expected))


def settings(order: Order = "sequential", **weight_pass: Any) -> Recipe:
    return Recipe(
        passes=(WeightPass(**weight_pass),),
        calibration=Calibration(source="pydoc", samples=8, seq_len=48),
        execution=Execution(order=order, batch_size=3, dtype="float32"),
    )


def transformers_logits(folder: Path, rows: Tensor, while_loading: bool) -> Tensor:
    """By transformers and compressed-tensors. while_loading: unpack the weights while loading, not
    at the first call."""
    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **(more if while_loading else {})
    ).eval()
    with torch.inference_mode():
        return model(input_ids=rows).logits


def check_checkpoint(source: Path, result: RunResult, linears: int) -> None:
    """The checkpoint holds so many quantized linears and is, to transformers, what lowbit means."""
    pytest.importorskip("compressed_tensors", reason="transformers needs it to read the layout")
    checkpoint = Checkpoint(result.out)
    assert len(checkpoint.schemes) == linears
    asymmetric = any(not s.weights.symmetric for s in checkpoint.schemes.values())
    # the only way for packed zero-points (docs/log.md) and for linears with a forward of their own
    while_loading = asymmetric or checkpoint.config["model_type"] == "falcon"
    rows = token_rows()
    got = transformers_logits(result.out, rows, while_loading)
    with torch.inference_mode():
        expected = fake_quantized(source, result.out)(input_ids=rows).logits
        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        unquantized = original.eval()(input_ids=rows).logits
    assert float((got - expected).abs().max()) < 1e-3
    assert float((got - unquantized).abs().max()) > 1e-2, "nothing was quantized"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", TESTED)
def test_quantized_checkpoints_load_in_transformers(
    family: str, order: Order, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    source = originals(family)
    result = quantize_model(source, tmp_path / "out", settings(order, group_size=16))
    in_a_layer = sum(map(len, SHARED.get(family, SHARED["llama"])))
    check_checkpoint(source, result, 2 * in_a_layer)
    assert max(result.relative_error.values()) < 0.02
    assert result.dropped_rows == 0


@pytest.mark.parametrize("family", TESTED)
def test_an_interrupted_run_resumes_to_the_same_bytes(
    family: str,
    originals: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    quantize_model(originals(family), whole, settings())
    write = Journal.write

    def interrupted(self: Journal, layer: str, *args: Any) -> None:
        if layer.endswith(".1"):
            raise KeyboardInterrupt
        write(self, layer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(originals(family), broken, settings())
    assert quantize_model(originals(family), broken, settings()).resumed_layers == 1
    assert hashes(broken) == hashes(whole)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize(
    ("scheme", "group_size"),
    [
        ("W4A16", None),
        ("W4A16", -1),
        ("W4A16_ASYM", 32),
        ("W3A16", 32),
        ("W3A16_ASYM", 16),
        ("W2A16", 16),
        ("W2A16_ASYM", 16),
        ("W8A16", None),
        ("W8A16", 32),
    ],
)
def test_every_scheme_loads_in_transformers(
    scheme: str,
    group_size: int | None,
    method: str,
    originals: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = originals("llama")
    recipe = settings(scheme=scheme, group_size=group_size, method=method)
    check_checkpoint(source, quantize_model(source, tmp_path / "out", recipe), 14)


def test_two_schemes_in_one_checkpoint(originals: Callable[[str], Path], tmp_path: Path) -> None:
    source = originals("qwen2")
    attention = WeightPass(targets=("re:.*self_attn.*",), scheme="W8A16", method="rtn")
    mlp = WeightPass(targets=("re:.*mlp.*",), ignore=("re:.*1.mlp.down_proj",), scheme="W4A16")
    recipe = settings()
    recipe = Recipe((attention, mlp), recipe.calibration, recipe.execution)
    result = quantize_model(source, tmp_path / "out", recipe)
    check_checkpoint(source, result, 13)
    bits = {n: s.weights.num_bits for n, s in Checkpoint(result.out).schemes.items()}
    assert {n for n, b in bits.items() if b == 8} == {n for n in bits if "self_attn" in n}
    assert "model.layers.1.mlp.down_proj" not in bits


def test_finite_rows_are_kept_in_float16(tmp_path: Path) -> None:
    """Inputs whose sum is beyond float16's range (65504) are finite all the same."""
    folder = save_tiny(tmp_path / "model", FAMILIES["llama"]())

    def all_large(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"].abs_()
        tensors["model.layers.0.input_layernorm.weight"].fill_(100)

    change_tensors(folder, all_large)
    onlooker = Onlooker()
    run_layers(LayeredModel(folder, torch.float16), token_rows(), onlooker)
    first = onlooker.hessians["model.layers.0.self_attn.q_proj"]
    assert 24 * 64 * float(first.diagonal().mean().sqrt()) > 65504
    assert onlooker.dropped == []


def test_too_many_rows_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", FAMILIES["opt"]())

    def poison(tensors: dict[str, Tensor]) -> None:
        row = tensors["model.decoder.embed_tokens.weight"][7]
        row[:32], row[32:] = 3e38, -3e38  # their difference is infinite

    change_tensors(folder, poison)
    rows = torch.full((20, 24), 3)
    rows[4, 5] = rows[11, 0] = 7
    for order in ORDERS:
        onlooker = Onlooker()
        run_layers(LayeredModel(folder), rows, onlooker, order, 8)
        assert onlooker.dropped == [4, 11]
        assert all(bool(torch.isfinite(h).all()) for h in onlooker.hessians.values())
        rows[17, 23] = 7
        with pytest.raises(UserError, match=r"3 of 20 calibration rows.*limit 10%.*float32"):
            run_layers(LayeredModel(folder), rows, Onlooker(), order, 8)
        rows[17, 23] = 3
