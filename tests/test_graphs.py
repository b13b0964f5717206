"""Decode steps that are replayed give what they give otherwise: sizes, padding, static memory.

Here a function is replayed by calling it again on the same memory; what CUDA adds to that is
checked on a GPU, by lowbit.evals.gpu_check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.triton_ops.launch import Target, recording
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.graphs import (
    MAX_BOUND,
    MAX_SIZE,
    DecodeGraphs,
    DecodeNumbers,
    Form,
    NotCapturableError,
    bounds,
    sizes,
)
from lowbit.runtime.kv_formats import resolve_kv
from lowbit.runtime.kv_pools import PagedKV
from lowbit.runtime.loader import load
from lowbit.runtime.models.decoder import Decoder
from lowbit.runtime.paged_engine import BLOCK_SIZE, PagedEngine
from lowbit.runtime.step_inputs import step_inputs

from .runtime_models import FAMILIES, VOCAB, save_tiny
from .test_decoder import DECODED

CPU = torch.device("cpu")
LONGEST = 128  # keys of a sequence
BLOCKS = LONGEST // BLOCK_SIZE


class Again:
    """In the place of the recorder of CUDA graphs. limit: so many captures, then no more."""

    nbytes = 0

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit

    def capture(self, fn: Callable[[], object]) -> Callable[[], object]:
        if self.limit == 0:
            raise NotCapturableError("the memory is full")
        self.limit -= 1
        fn()
        return fn


class Steps:
    """A decoder over pools of its own, with and without graphs; sequence i has the blocks from
    1 + i * BLOCKS on."""

    def __init__(self, folder: Path, kv: str = "model", max_num_seqs: int = 8) -> None:
        loaded = load(folder, "cpu", "float32")
        self.decoder = Decoder(loaded.model, LONGEST)
        storage = resolve_kv(kv, loaded.kv, loaded.model.config)
        self.kv = PagedKV(
            self.decoder.layers, self.decoder.kinds, storage, torch.float32, loaded.device
        )
        self.kv.allocate(9 * BLOCKS, 0)
        draws = torch.Generator().manual_seed(0)
        for pools in self.kv.pools:
            for pool in pools:
                if pool.fmt is None:
                    pool.codes.copy_(torch.randn(pool.codes.shape, generator=draws))
        self.graphs = DecodeGraphs(self.decoder, self.kv.pools, max_num_seqs, LONGEST, CPU, Again())

    def numbers(self, lengths: list[int]) -> DecodeNumbers:
        """A step in which sequences have so many keys by then, in tables as long as they need."""
        kinds = len(self.decoder.windows)
        tables = [
            [1 + i * BLOCKS + n for n in range(-(-length // BLOCK_SIZE))]
            for i, length in enumerate(lengths)
        ]
        positions = [length - 1 for length in lengths]
        slots = [
            table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for table, p in zip(tables, positions, strict=True)
        ]
        ids = [(7 * i + length) % VOCAB for i, length in enumerate(lengths)]
        return DecodeNumbers(ids, positions, [slots] * kinds, lengths, [tables] * kinds)

    @torch.inference_mode()
    def eager(self, numbers: DecodeNumbers) -> torch.Tensor:
        ids, positions, slots, lengths, tables = numbers
        step = step_inputs(ids, positions, slots, [1] * len(ids), lengths, tables, CPU)
        hidden = self.decoder(step.token_ids, self.kv.pools, step.batches, step.new)
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def replayed(self, numbers: DecodeNumbers) -> torch.Tensor:
        form = self.graphs.form(len(numbers.token_ids), max(numbers.context_lens))
        assert form is not None
        return self.graphs.logits(form, numbers).clone()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(tmp_path_factory.mktemp(family), FAMILIES[family]())
        return made[family]

    return folder


@pytest.mark.parametrize("kv", ["model", "int8"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_padded_step_gives_the_logits_of_the_step(family: str, kv: str, folders) -> None:
    steps = Steps(folders(family), kv)
    steps.graphs.capture(use_tqdm=False)
    assert steps.graphs.sizes == [1, 2, 4, 8]
    draws = torch.Generator().manual_seed(1)
    for count in (1, 8, 3, 2, 5, 7, 4, 6):
        lengths = torch.randint(1, LONGEST, (count,), generator=draws).tolist()
        numbers = steps.numbers(lengths)
        want = steps.eager(numbers)
        got = steps.replayed(numbers)
        assert got.shape == (count, VOCAB)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert steps.graphs.form(9, LONGEST) is None


def test_padding_is_stored_nowhere_and_what_was_there_before_is_gone(folders) -> None:
    steps = Steps(folders("gemma3"))
    steps.graphs.capture(use_tqdm=False)
    steps.replayed(steps.numbers([LONGEST] * 8))  # the memory is full of real rows
    numbers = steps.numbers([40, 3, 77])
    steps.eager(numbers)  # stores what the replay will store
    before = [pool.codes.clone() for pools in steps.kv.pools for pool in pools]
    steps.replayed(numbers)
    after = [pool.codes for pools in steps.kv.pools for pool in pools]
    for had, has in zip(before, after, strict=True):
        torch.testing.assert_close(has, had, rtol=0, atol=1e-5)
        assert torch.equal(has[0], had[0])  # not even in the block that is nobody's


def test_graphs_are_captured_from_the_largest_down_and_the_smallest_that_fits_runs(
    folders, monkeypatch
) -> None:
    monkeypatch.setattr("lowbit.runtime.graphs.FIRST_BOUND", 32)
    steps = Steps(folders("llama"))
    assert steps.graphs.bounds == [32, 128]
    steps.graphs.capture(use_tqdm=False)
    order = [Form(n, b) for b in (128, 32) for n in (8, 4, 2, 1)]
    assert list(steps.graphs._replays) == order
    assert steps.graphs.form(3, 32) == Form(4, 32)
    assert steps.graphs.form(3, 33) == Form(4, 128)
    assert steps.graphs.form(8, 129) is None
    for length in (31, 32, 33, 128):  # the tables of a bound are wide enough
        numbers = steps.numbers([length, 5])
        torch.testing.assert_close(
            steps.replayed(numbers), steps.eager(numbers), rtol=1e-5, atol=1e-5
        )


def test_what_cannot_be_captured_is_told_and_runs_without(folders) -> None:
    steps = Steps(folders("llama"))
    steps.graphs._recorder = Again(limit=2)
    steps.graphs.capture(use_tqdm=False)
    assert steps.graphs.form(8, 50) and steps.graphs.form(3, 50)
    assert steps.graphs.form(2, 50) is None, "a batch of 2 is not padded to 4"
    assert "2 CUDA graphs of up to 8 sequences" in steps.graphs.describe()
    assert "no more: the memory is full" in steps.graphs.describe()
    steps = Steps(folders("llama"))
    steps.graphs._recorder = Again(limit=0)
    steps.graphs.capture(use_tqdm=False)
    assert steps.graphs.form(1, 1) is None
    assert steps.graphs.describe() == "no CUDA graphs: the memory is full"


GPU_KERNELS = ("attention_triton", "kv_store_triton", "norm_triton")
ASKS_THE_HOST = {"mixtral", "qwen3_moe"}  # experts of floats, which run one by one


@pytest.mark.parametrize("kv", ["model", "int8"])
@pytest.mark.parametrize("family", sorted(DECODED.keys() - ASKS_THE_HOST))
def test_a_step_by_gpu_kernels_asks_the_device_for_nothing(
    family: str, kv: str, tmp_path, monkeypatch
) -> None:
    """On meta, where nothing has a value that could be asked for; launches are recorded."""
    for module in GPU_KERNELS:
        monkeypatch.setattr(f"lowbit.kernels.{module}.decline_triton", lambda device: None)
    loaded, meta = load(save_tiny(tmp_path, DECODED[family]()), "cpu", "bfloat16"), "meta"
    decoder = Decoder(loaded.model.to(meta), 4096)
    storage = resolve_kv(kv, loaded.kv, loaded.model.config)
    device = torch.device(meta)
    pools = PagedKV(decoder.layers, decoder.kinds, storage, torch.bfloat16, device)
    pools.allocate(9, 0)
    graphs = DecodeGraphs(decoder, pools.pools, 2, 4096, device, Again())
    with recording(Target("cuda", 90)) as launches:
        graphs.capture(use_tqdm=False)
    attention = [launch for launch in launches if launch.kernel.__name__ == "attention_kernel"]
    # once before the first, then each: sizes 2 and 1, bounds 4096 and 2048, splits of 512 keys
    assert [launch.args["splits"] for launch in attention] == [8] * 6 + [4] * 4
    assert [launch.args["seqs"] for launch in attention] == [2] * 4 + [1] * 2 + [2] * 2 + [1] * 2
    assert all(launch.constants["ONE_TILE"] for launch in attention)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 16, 17, 100, 256, 500, 512, 4000])
def test_sizes_are_few_and_reach_every_batch(most: int) -> None:
    listed = sizes(most)
    assert listed == sorted(set(listed)) and listed[-1] == min(most, MAX_SIZE)
    assert len(listed) <= 27
    for count in range(1, listed[-1] + 1):
        size = next(n for n in listed if n >= count)
        assert size - count < max(8, size // 4)


def test_bounds_are_few_and_reach_every_context() -> None:
    assert bounds(300) == [300]
    assert bounds(2048) == [2048]
    assert bounds(4096) == [2048, 4096]
    assert bounds(131_072) == [2048, 8192, 32_768, 131_072]
    assert bounds(1 << 30)[-1] == MAX_BOUND


PROMPTS = ["All of these prompts begin alike, and go on.", "All of these", "Other words", "x"]


def engine_of(llm: LLM) -> PagedEngine:
    assert isinstance(llm._engine, PagedEngine)
    return llm._engine


def with_graphs(llm: LLM) -> LLM:
    """The engine of `llm` replays steps as far as a recorder that calls functions again does."""
    engine = engine_of(llm)
    graphs = DecodeGraphs(
        engine._decoder, engine._kv.pools, engine.limits.max_num_seqs,
        engine.limits.max_model_len, CPU, Again(),
    )  # fmt: skip
    graphs.capture(use_tqdm=False)
    engine._runner.graphs = graphs
    return llm


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_engine_with_graphs_gives_the_same_tokens(
    family: str, overlaps: bool, folders, monkeypatch
) -> None:
    """Also where the tokens of the step before have not been read: see test_overlap.py."""
    params = [
        SamplingParams(max_tokens=n, temperature=t, seed=n, ignore_eos=True, logprobs=2)
        for n, t in ((30, 0.0), (9, 0.7), (21, 0.0), (14, 1.0))
    ]
    plain = LLM(folders(family), "cpu", "float32", max_num_seqs=3)
    want = plain.generate(PROMPTS, params, use_tqdm=False)
    replays: list[tuple[Form, bool]] = []
    logits = DecodeGraphs.logits

    def noted(self: Any, form: Form, numbers: Any, change: Any = None) -> Any:
        replays.append((form, change is not None))
        return logits(self, form, numbers, change)

    monkeypatch.setattr(DecodeGraphs, "logits", noted)
    llm = with_graphs(LLM(folders(family), "cpu", "float32", max_num_seqs=3))
    engine_of(llm)._overlaps = overlaps
    got = llm.generate(PROMPTS, params, use_tqdm=False)
    assert {form.size for form, _ in replays} == {1, 2, 3}
    assert any(changed for _, changed in replays) == overlaps
    for a, b in zip(want, got, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs is not None and b.outputs[0].logprobs is not None
        for x, y in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert {t: p.logprob for t, p in x.items()} == pytest.approx(
                {t: p.logprob for t, p in y.items()}, abs=1e-4
            )


def test_an_engine_says_why_it_has_no_graphs(folders) -> None:
    llm = LLM(folders("llama"), "cpu", "float32")
    assert "the model is on cpu" in llm.decode_graphs
    assert engine_of(llm)._runner.graphs is None
