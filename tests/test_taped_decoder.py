"""The decoder's layers as a tape give what they give op by op, in every batch the same bits; what
has no tape is declined with the reason."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.compiled import decline_compiled
from lowbit.kernels.kv_quant import KVFormat
from lowbit.kernels.paged_kv import new_pool
from lowbit.kernels.plain_linear import choose_plain
from lowbit.quantize.planning import runtimes
from lowbit.runtime import linear as packed_linears
from lowbit.runtime.loader import load
from lowbit.runtime.models.decoder import KVPools
from lowbit.runtime.models.taped import decline_layers

from .runtime_models import quantize_folder, save_tiny
from .tapes import needs_tape, shared_walker
from .test_decoder import BLOCK, BLOCKS, DECODED, LENGTH, Run, loaded, sequence

pytestmark = needs_tape
if decline_compiled() is None:
    from lowbit.kernels import plain_linear
    from lowbit.kernels.tape import program

DENSE = [name for name in DECODED if name not in ("mixtral", "qwen3_moe")]


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also on a CPU with AVX512, where other ways are faster."""
    monkeypatch.setattr(program, "walker", shared_walker)
    for module in (runtimes, plain_linear):
        monkeypatch.setattr(module, "prefers_compiled", lambda: True)
    choose_plain.cache_clear()
    yield
    choose_plain.cache_clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a family, or of a scheme that Qwen 2 (with biases) or Gemma 3 is quantized by."""
    made: dict[str, Path] = {}

    def folder(family: str, scheme: str | None = None, **options: Any) -> Path:
        name = f"{family}-{scheme}-{options}"
        if name not in made:
            place = tmp_path_factory.mktemp("models") / "model"
            made[name] = (
                save_tiny(place, DECODED[family](), tokenizer=False) if scheme is None
                else quantize_folder(folder(family), place, scheme, **options)
            )  # fmt: skip
        return made[name]

    return folder


def both(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Run, Run]:
    """The model as a tape, and op by op."""
    models = [loaded(folder) for _ in range(2)]
    if dtype != torch.float32:
        models = [load(folder, "cpu", dtype).model for _ in range(2)]
    taped, plain = Run(models[0], dtype), Run(models[1], dtype, compiled=False)
    assert decline_layers(taped.decoder.layers, taped.pools) is None
    return taped, plain


Chunks = Sequence[tuple[int, Sequence[int], int]]


def compare(runs: tuple[Run, Run], chunks: Chunks, limit: float) -> None:
    got, expected = (run(chunks) for run in runs)
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < limit, f"{error:.2e}"


STEPS: list[Chunks] = [
    [(0, sequence(0), 0), (1, sequence(1, 27), 0)],
    [(2, sequence(0)[:9], 0), (0, [5], LENGTH)],
    [(1, [7], 27), (2, sequence(0)[9:33], 9), (0, [6], LENGTH + 1), (3, sequence(3, 3), 0)],
    [(3, [9], 3)],
]


@pytest.mark.parametrize("family", DENSE)
def test_a_tape_is_the_model_op_by_op(family: str, folders) -> None:
    runs = both(folders(family))
    for chunks in STEPS:
        compare(runs, chunks, 1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_tape_in_bfloat16(family: str, folders) -> None:
    runs = both(folders(family), torch.bfloat16)
    for chunks in STEPS:
        compare(runs, chunks, 4e-2)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize(
    ("scheme", "group"),
    [("W4A16", 32), ("W4A16_ASYM", 32), ("W3A16", 32), ("W8A16", None), ("W8A8", None)],
)
def test_a_tape_of_packed_weights(scheme: str, group: int | None, family: str, folders) -> None:
    runs = both(folders(family, scheme, group_size=group))
    for chunks in STEPS:
        # an input of 8 bits that lies near the middle of two codes takes the other one
        compare(runs, chunks, 1e-3 if scheme != "W8A8" else 5e-2)


def test_a_tape_of_packed_weights_in_bfloat16(folders) -> None:
    runs = both(folders("llama", "W4A16", group_size=32), torch.bfloat16)
    for chunks in STEPS:
        compare(runs, chunks, 4e-2)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_linears_of_several_schemes_beside_each_other(scheme: str, folders) -> None:
    """Those that read one input want it in different forms."""
    mixed = {"q_proj": "W8A8", "v_proj": "W8A16", "down_proj": "W4A16", "gate_proj": "W8A8"}
    runs = both(folders("llama", scheme, mixed=mixed))
    for chunks in STEPS:
        compare(runs, chunks, 5e-2)  # W8A8's inputs, as above


@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A8"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_token_has_the_same_bits_in_every_batch(family: str, scheme: str | None, folders) -> None:
    run = Run(loaded(folders(family) if scheme is None else folders(family, scheme)))
    run.decoder.logits = lambda hidden: hidden  # the head is another product
    alone = run([(0, sequence(0), 0)])
    beside = run([(1, sequence(1, 27), 0), (2, sequence(0), 0), (3, [4], 0)])
    assert torch.equal(beside[27 : 27 + LENGTH], alone)
    pieces = [run([(3, sequence(0)[:1], 0)]), run([(1, [3], 27), (3, sequence(0)[1:18], 1)])[1:]]
    pieces += [run([(3, [token], at)]) for at, token in enumerate(sequence(0)) if at >= 18]
    assert torch.equal(torch.cat(pieces), alone)


@pytest.mark.parametrize("scheme", [None, "W4A16"])
def test_random_steps(scheme: str | None, folders) -> None:
    """Prefill, pieces of it and decode, of sequences that end and begin in blocks of others."""
    runs = both(folders("mistral") if scheme is None else folders("mistral", scheme))
    draw, lengths = random.Random(1), [0] * 4
    room = BLOCKS // 4 * BLOCK
    for step in range(100):
        chunks: list[tuple[int, list[int], int]] = []
        for number in draw.sample(range(4), draw.randint(1, 4)):
            if lengths[number] == room or draw.random() < 0.05:
                lengths[number] = 0
            most = min(room - lengths[number], draw.choice([1, 1, 1, 3, 9, 40]))
            ids = sequence(step, draw.randint(1, most))
            chunks.append((number, ids, lengths[number]))
            lengths[number] += len(ids)
        compare(runs, chunks, 1e-4 if scheme is None else 1e-3)


def pools_of(run: Run, fmt: KVFormat | None, dtype: torch.dtype) -> list[KVPools]:
    return [
        KVPools(*(new_pool(2, x.kv_heads, BLOCK, x.head_dim, fmt, dtype) for _ in "kv"))
        for x in run.decoder.layers
    ]


def test_what_is_declined(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(loaded(folders("llama")))
    layers = run.decoder.layers
    assert decline_layers(layers, run.pools) is None
    int8 = KVFormat("int", 8, True, "channels", 16)
    for pools, why in (
        (pools_of(run, int8, torch.float32), "keeps keys and values as floats of one dtype"),
        (pools_of(run, None, torch.float64), "has no torch.float64"),
        (pools_of(run, None, torch.bfloat16), "takes float weights as they are, in the dtype of"),
        (run.pools[:1] + pools_of(run, None, torch.float16)[1:], "floats of one dtype"),
    ):
        assert why in (decline_layers(layers, pools) or "")
    interleaved = layers[0].store.rotary._replace(interleaved=True)
    monkeypatch.setattr(layers[0], "store", layers[0].store._replace(rotary=interleaved))
    assert "not neighbours" in (decline_layers(layers, run.pools) or "")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_declined(family: str, folders) -> None:
    run = Run(loaded(folders(family)))
    assert "mixture of experts" in (decline_layers(run.decoder.layers, run.pools) or "")
    assert run([(0, sequence(0), 0)]).isfinite().all()


def test_static_scales_of_inputs_are_declined(folders) -> None:
    run = Run(loaded(folders("llama", "W8A8_STATIC", group_size=None)))
    declined = decline_layers(run.decoder.layers, run.pools) or ""
    assert "static" in declined or "has no op for w8a8_cpu" in declined
    assert run([(0, sequence(0), 0)]).isfinite().all()


def test_columns_in_another_order_are_declined(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(loaded(folders("llama", "W4A16")))
    assert decline_layers(run.decoder.layers, run.pools) is None
    monkeypatch.setattr(packed_linears.PackedLinear, "reorders", True)
    assert "columns in their order" in (decline_layers(run.decoder.layers, run.pools) or "")


def test_a_step_does_not_look_through_the_modules(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """For linears with threads of their own: that would take longer than planning it."""
    taped, plain = both(folders("llama"))
    monkeypatch.setattr(torch.nn.Module, "modules", lambda self: pytest.fail("looked through"))
    for run in (taped, plain):
        with run.decoder.threads(run.pools):
            run([(0, sequence(0, 4), 0)])
