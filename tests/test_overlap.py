"""Steps that are planned before the tokens of the step before are read give the same tokens, and a
step reads from the device once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.paged_engine import BLOCK_SIZE, PagedEngine
from lowbit.runtime.request import Request
from lowbit.runtime.scheduling.integrity import check_scheduler
from lowbit.runtime.transfers import Incoming
from torch.overrides import TorchFunctionMode

from .runtime_models import FAMILIES, VOCAB, save_tiny

SHARED = "All prompts begin with these words, which fill several blocks. "
PROMPTS = [SHARED + end for end in ("One.", "Another one, a bit longer.", "", "Last")] + ["x", "yz"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


def engine_of(llm: LLM) -> PagedEngine:
    assert isinstance(llm._engine, PagedEngine)
    return llm._engine


class Ahead:
    """An LLM whose steps overlap; ahead: how many were planned with another in flight."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.llm = LLM(folder, "cpu", "float32", engine="paged", **options)
        self.engine, self.ahead = engine_of(self.llm), 0
        self.engine._overlaps = True
        launch = self.engine._launch

        def counted(before: Any) -> Any:
            self.ahead += before is not None
            return launch(before)

        self.engine._launch = counted

    def generate(self, params: Any) -> list[Any]:
        outputs = self.llm.generate(PROMPTS, params, use_tqdm=False)
        check_scheduler(self.engine._scheduler)
        assert self.engine._flight is None and not self.engine._live
        assert self.engine.scheduler_stats.kv.blocks_in_use == 0
        return outputs


def check_same(got: list[Any], want: list[Any]) -> None:
    """Logprobs differ in their last bits with what runs beside a request."""
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert (a.text, a.finish_reason, a.stop_reason) == (
                b.text, b.finish_reason, b.stop_reason,
            )  # fmt: skip
            assert own_logprobs(a) == pytest.approx(own_logprobs(b), abs=1e-4)


def own_logprobs(completion: Any) -> list[float]:
    """Of its tokens, where they were asked for."""
    entries = completion.logprobs or []
    return [entry[t].logprob for entry, t in zip(entries, completion.token_ids, strict=False)]


GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_tokens=10 + 5 * i, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=i,
                   logprobs=i % 3, min_tokens=3, logit_bias={5: 1.0})
    for i in range(len(PROMPTS))
]  # fmt: skip
STOPS = SamplingParams(
    max_tokens=40, temperature=1.0, seed=3, stop=["e", "A"], stop_token_ids=list(range(0, VOCAB, 9))
)
SEVERAL = SamplingParams(max_tokens=12, temperature=1.0, seed=1, n=3)
PENALTIES = SamplingParams(
    max_tokens=16, temperature=0.5, seed=2, repetition_penalty=1.3, frequency_penalty=0.2
)


MIXED = [GREEDY, PENALTIES, STOPS, GREEDY, SEVERAL, STOPS]


@pytest.mark.parametrize(
    "params",
    [GREEDY, SAMPLED, STOPS, SEVERAL, PENALTIES, MIXED],
    ids=["greedy", "sampled", "stops", "several", "penalties", "mixed"],
)
@pytest.mark.parametrize("max_num_seqs", [3, 6])
def test_tokens_are_those_of_steps_one_by_one(folder, params, max_num_seqs) -> None:
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 32}
    alone = LLM(folder, "cpu", "float32", engine="paged", **options)
    want = alone.generate(PROMPTS, params, use_tqdm=False)
    ahead = Ahead(folder, **options)
    got = ahead.generate(params)
    check_same(got, want)
    assert (ahead.ahead == 0) == (params is PENALTIES)
    counted = [llm.metrics().output_tokens for llm in (alone, ahead.llm)]
    assert counted[0] == counted[1]
    assert ahead.llm.stats.decode_tokens == alone.stats.decode_tokens
    check_same(ahead.generate(params), want)  # nothing was left in flight


def test_requests_that_give_up_their_blocks_give_the_same_tokens(folder) -> None:
    alone = LLM(folder, "cpu", "float32", engine="paged")
    want = alone.generate(PROMPTS, GREEDY, use_tqdm=False)
    pools = engine_of(alone)._kv.pools
    a_block = sum(p.nbytes // len(p.codes) for pair in pools for p in pair)
    longest = max(len(o.prompt_token_ids) for o in want) + GREEDY.max_tokens
    for swap in (0, 1 << 20):
        ahead = Ahead(
            folder, kv_memory=a_block * (-(-longest // BLOCK_SIZE) + 4), swap_memory=swap,
            enable_prefix_caching=False,
        )  # fmt: skip
        check_same(ahead.generate(GREEDY), want)
        assert ahead.engine.scheduler_stats.preemptions > 0 and ahead.ahead > 0


def test_requests_come_and_go_while_a_step_is_in_flight(folder) -> None:
    alone = LLM(folder, "cpu", "float32", engine="paged")
    want = {p: o.outputs[0].token_ids for p, o in zip(
        PROMPTS, alone.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True)}  # fmt: skip
    ahead = Ahead(folder, max_num_seqs=4)
    engine, maker = ahead.engine, ahead.llm._maker
    requests: dict[str, Request] = {}
    ended: list[Any] = []

    def add(prompt: str) -> Request:
        request = maker.requests([prompt], GREEDY)[0]
        requests[prompt] = request
        engine.add(request)
        return request

    left = add(PROMPTS[0])
    add(PROMPTS[1])
    for _ in range(6):
        ended += [r for r in engine.step() if r.finished]
        check_scheduler(engine._scheduler)
    assert engine._flight is not None
    engine.abort(left.request_id)  # its token is on its way
    count = len(left.continuations[0].token_ids)
    for prompt in PROMPTS[2:]:
        add(prompt)
        for _ in range(3):
            ended += [r for r in engine.step() if r.finished]
            check_scheduler(engine._scheduler)
    while engine.has_work:
        ended += [r for r in engine.step() if r.finished]
    assert len(ended) == len(set(ended)) == len(PROMPTS) - 1 and left not in ended
    assert len(left.continuations[0].token_ids) == count
    assert left.continuations[0].finish_reason == "abort"
    for prompt in PROMPTS[1:]:
        assert requests[prompt].continuations[0].token_ids == want[prompt]
    assert engine.scheduler_stats.kv.blocks_in_use == 0 and ahead.ahead > 10


def test_a_request_whose_logits_break_in_flight_fails_alone(folder, monkeypatch) -> None:
    alone = LLM(folder, "cpu", "float32", engine="paged")
    want = alone.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    ahead = Ahead(folder)
    engine = ahead.engine
    requests = ahead.llm._maker.requests(PROMPTS[:2], GREEDY)
    for request in requests:
        engine.add(request)
    for _ in range(5):
        engine.step()
    logits = engine._decoder.logits
    with monkeypatch.context() as patch:
        patch.setattr(
            engine._decoder, "logits",
            lambda hidden: logits(hidden).index_fill(0, torch.tensor([0]), torch.nan),
        )  # fmt: skip
        engine.step()
        assert engine._flight is not None and not requests[0].finished
    while engine.has_work:
        engine.step()
        check_scheduler(engine._scheduler)
    assert requests[0].error is not None and "not finite" in requests[0].error
    assert requests[1].continuations[0].token_ids == want[1].outputs[0].token_ids
    assert engine.scheduler_stats.kv.blocks_in_use == 0


WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "_unique2", "masked_select",
         "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "argwhere",
         "synchronize", "repeat_interleave"}  # fmt: skip
"""Functions of tensors for which a GPU is waited for."""


class Reads(TorchFunctionMode):
    """What a step would wait for a GPU for: by function, how often. paused: of what is on the host
    whatever the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.paused = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.paused:
            name = getattr(func, "__name__", "")
            by_content = name in ("__getitem__", "__setitem__") and any(
                isinstance(i, list) or (isinstance(i, torch.Tensor) and i.dtype == torch.bool)
                for i in (args[1] if isinstance(args[1], tuple) else (args[1],))
            )
            made_there = name in ("tensor", "as_tensor") and "device" in kwargs
            if name in WAITS or by_content or made_there:
                self.seen.append(name)
        return func(*args, **kwargs)

    def quiet(self, found: Callable[..., Any]) -> Callable[..., Any]:
        """`found`, in which nothing is counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.pause():
                return found(*args, **kwargs)

        return call

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1


@pytest.fixture
def reads(monkeypatch) -> Reads:
    """Counts `Incoming.read` as one, and does not look into a CPU's kernels or at what lies on the
    host in any case."""
    seen = Reads()
    read = Incoming.read

    def counted(self: Incoming) -> Any:
        seen.seen.append("read")
        with seen.pause():
            return read(self)

    monkeypatch.setattr(Incoming, "read", counted)
    for place in (
        "runtime.step_inputs.Outgoing", "runtime.sampling.picker.uniforms",
        "runtime.sampling.picker.Rows._places", "runtime.sampling.adjust._distinct",
    ):  # fmt: skip
        monkeypatch.setattr(f"lowbit.{place}", seen.quiet(resolve_name(f"lowbit.{place}")))
    monkeypatch.setattr("lowbit.runtime.sampler._falling", _falling_on_a_gpu)
    return seen


def _falling_on_a_gpu(probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return probs.sort(dim=-1, descending=True).values


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SAMPLED,
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.8, seed=1, logprobs=4),
        PENALTIES,
    ],
    ids=["greedy", "sampled", "top_p and logprobs", "penalties"],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_waits_for_the_device_once_at_most(tmp_path, reads, params, overlaps) -> None:
    folder = save_tiny(tmp_path, FAMILIES["llama"]())
    llm = LLM(folder, "cpu", "float32", engine="paged")
    engine = engine_of(llm)
    engine._overlaps = overlaps
    decoder: Any = reads.quiet(engine._decoder)  # whose kernels are a CPU's
    decoder.logits = engine._decoder.logits
    engine._runner.decoder = decoder
    for request in llm._maker.requests(PROMPTS, params):
        engine.add(request)
    steps = 0
    while engine.has_work:
        reads.seen.clear()
        with reads:
            engine.step()
        assert len(reads.seen) <= 1 and set(reads.seen) <= {"read"}, reads.seen
        steps += 1
    assert steps >= 9
