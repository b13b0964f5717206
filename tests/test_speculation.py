"""Speculation changes no token: not by greedy choice, not by draws, whatever is proposed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, SamplingParams, StructuredOutputsParams
from lowbit.runtime.paged_engine import PagedEngine
from lowbit.runtime.scheduling.integrity import check_scheduler
from lowbit.runtime.speculation import Drafting, Proposal, Speculator, Verified
from lowbit.runtime.speculation.governor import Governor

from .runtime_models import FAMILIES, OTHERS, VOCAB, save_tiny

WORDS = "the cat and the dog and the cat and the bird sat on the mat and the cat".split()  # noqa: SIM905
PROMPTS = [" ".join(WORDS[: 2 + i % 14]) + f" {i % 5}" * (i % 4) for i in range(12)]
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


class Always(Governor):
    """Proposes whatever it costs: tests must not depend on how fast the machine is."""

    def wants(self, sequences: int) -> bool:
        return True

    @property
    def is_on(self) -> bool:
        return True


class Oracle:
    """Proposes what is known to come, but every `wrong`th token of the text another one."""

    name = "oracle"

    def __init__(self, outputs: dict[tuple[Any, ...], list[int]], most: int, wrong: int) -> None:
        self.outputs, self.most, self.wrong = outputs, most, wrong

    def propose(self, asked: Sequence[Drafting]) -> list[Proposal]:
        proposals = []
        for continuation, _, most in asked:
            known = self.outputs[(*continuation.request.prompt_token_ids, continuation.index)]
            done = len(continuation.token_ids)
            places = range(done, min(len(known), done + most))
            tokens = [(known[i] + (i % self.wrong == 0)) % VOCAB for i in places]
            proposals.append(Proposal(tokens))
        return proposals

    def observe(self, verified: Sequence[Verified]) -> None:
        for each in verified:
            assert len(each.logits) == len(each.tokens) > each.accepted >= 0


def engine(llm: LLM) -> PagedEngine:
    assert isinstance(llm._engine, PagedEngine)
    return llm._engine


def always(llm: LLM, proposer: Any = None) -> LLM:
    """Let `llm` propose in every step, by `proposer` or its own."""
    paged = engine(llm)
    if proposer is not None:
        paged._speculator = paged._results._speculator = Speculator(proposer)
    assert paged._speculator is not None
    paged._speculator.governor = Always()
    return llm


def tokens(llm: LLM, params: Any = GREEDY, prompts: Any = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [c.token_ids for o in outputs for c in o.outputs]


def oracle(llm: LLM, params: Any, prompts: Sequence[str], most: int = 5, wrong: int = 4) -> Oracle:
    """Of what `llm` gives."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    known = {(*o.prompt_token_ids, c.index): c.token_ids for o in outputs for c in o.outputs}
    return Oracle(known, most, wrong)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory) -> Path:
    """Of one kind of layers, and of two, one of them with a window of 8."""
    return save_tiny(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    """Another model with the same tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("draft"), FAMILIES["qwen2"](), seed=1)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, "cpu", "float32")


@pytest.mark.parametrize("method", ["ngram", "lookahead", "draft", "itself"])
def test_greedy_tokens_are_those_of_plain_decoding(
    method: str, folder: Path, draft: Path, plain: LLM
) -> None:
    named = {"draft": str(draft), "itself": str(folder)}.get(method, method)
    llm = always(LLM(folder, "cpu", "float32", speculate=named))
    assert tokens(llm) == tokens(plain)
    told = llm.metrics().speculation
    assert told is not None and told.active
    if method == "itself":
        assert told.acceptance_rate > 0.99 and told.tokens_per_step > 4
    elif "gemma3" in folder.name:  # whose text repeats itself
        assert told.proposed > 0 and (told.accepted > 0 or method == "draft")


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_num_seqs": 16, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"max_num_seqs": 8, "max_num_batched_tokens": 40, "blocks": 14},
    ],
    ids=str,
)
def test_steps_without_room_for_all_proposals(folder: Path, plain: LLM, options: Any) -> None:
    limits = {name: value for name, value in options.items() if name != "blocks"}
    if "blocks" in options:
        pools = engine(plain)._kv.pools
        each = sum(p.nbytes // len(p.codes) for pair in pools for p in pair)
        limits["kv_memory"] = (options["blocks"] + 1) * each
    llm = LLM(folder, "cpu", "float32", **limits)
    always(llm, oracle(plain, GREEDY, PROMPTS))
    assert tokens(llm) == tokens(plain)
    told = llm.metrics()
    assert told.speculation is not None and 0.3 < told.speculation.acceptance_rate < 0.9
    assert (told.preemptions > 0) == ("blocks" in options)
    assert told.kv_usage == 0
    check_scheduler(engine(llm)._scheduler)


@pytest.mark.parametrize(
    "params",
    [
        {"n": 3, "temperature": 1.1, "seed": 3},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "seed": 4},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"min_tokens": 20, "stop_token_ids": list(range(0, VOCAB, 3)), "ignore_eos": False},
        {"logit_bias": {7: 30.0, 8: 29.0}, "temperature": 2.0, "seed": 1},
        {"logprobs": 2, "stop": [" ", "e", "x"]},
        {"structured_outputs": StructuredOutputsParams(regex="(ab|cd|[0-9]x){4,20}")},
    ],
    ids=lambda p: next(iter(p)),
)
def test_what_is_asked_of_the_sampler_holds_for_verified_tokens(
    folder: Path, plain: LLM, params: Any
) -> None:
    """Chosen proposals leave even the draws of a seed as they are."""
    asked = {"ignore_eos": "structured_outputs" not in params, **params}
    sampling = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, **asked})
    want = plain.generate(PROMPTS, sampling, use_tqdm=False)
    guesses = oracle(plain, sampling, PROMPTS)
    llm = always(LLM(folder, "cpu", "float32"), guesses)
    got = llm.generate(PROMPTS, sampling, use_tqdm=False)
    told = llm.metrics().speculation
    assert told is not None and told.accepted > 60
    for a, b in zip(want, got, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.token_ids, x.text, x.finish_reason) == (y.token_ids, y.text, y.finish_reason)
            for before, after in zip(x.logprobs or [], y.logprobs or [], strict=True):
                assert before.keys() == after.keys()
                for token in before:
                    assert before[token].logprob == pytest.approx(after[token].logprob, abs=1e-4)


def test_a_draft_model_without_room_makes_no_proposals(folder: Path, plain: LLM) -> None:
    llm = always(LLM(folder, "cpu", "float32", speculate=str(folder), max_num_seqs=4))
    proposer = engine(llm)._speculator.proposer  # type: ignore[union-attr]
    proposer.allocate(3)  # type: ignore[attr-defined]
    assert tokens(llm) == tokens(plain)
    told = llm.metrics().speculation
    assert told is not None and 0 < told.proposed < 12 * 29 / 2
    assert not proposer._blocks.allocators[0].in_use or proposer._known  # type: ignore[attr-defined]


def test_a_draft_model_proposes_within_its_own_context(folder: Path, tmp_path: Path) -> None:
    config = FAMILIES["opt"]()  # whose positions are rows of a table
    config.max_position_embeddings = 24
    short = save_tiny(tmp_path / "short", config)
    prompt = [PROMPTS[0][:6]]
    llm = always(LLM(folder, "cpu", "float32", speculate=str(short)))
    assert tokens(llm, prompts=prompt) == tokens(LLM(folder, "cpu", "float32"), prompts=prompt)
    told = llm.metrics().speculation
    assert told is not None and 0 < told.proposed < 4 * 24


def test_who_cannot_speculate_is_told_why(folder: Path, tmp_path: Path) -> None:
    bloom = save_tiny(tmp_path / "bloom", OTHERS["bloom"]())
    with pytest.raises(UserError, match="speculate needs the paged engine; it .* not bloom"):
        LLM(bloom, "cpu", "float32", speculate="ngram")
    with pytest.raises(UserError, match="num_speculative_tokens must be at least 1, got 0"):
        LLM(folder, "cpu", "float32", speculate="ngram", num_speculative_tokens=0)
    with pytest.raises(UserError, match="draft model .*bloom' cannot run over blocks: it "):
        LLM(folder, "cpu", "float32", speculate=str(bloom))
    config = FAMILIES["llama"]()
    config.vocab_size -= 1
    other = save_tiny(tmp_path / "other", config)
    with pytest.raises(UserError, match=r"another vocabulary \(271 columns, and the model has 272"):
        LLM(folder, "cpu", "float32", speculate=str(other))


def test_aborted_requests_leave_nothing_in_the_draft_model(folder: Path) -> None:
    llm = always(LLM(folder, "cpu", "float32", speculate=str(folder)))
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(3):
        next(stream)
    stream.close()
    llm.generate(PROMPTS[1], SamplingParams(max_tokens=4), use_tqdm=False)
    proposer = engine(llm)._speculator.proposer  # type: ignore[union-attr]
    proposer.propose([])  # type: ignore[attr-defined]
    assert proposer._blocks.allocators[0].in_use == 0  # type: ignore[attr-defined]
    assert not engine(llm)._scheduler.has_work


def test_a_request_that_fails_while_it_verifies_is_alone_in_it(folder: Path) -> None:
    llm = LLM(folder, "cpu", "float32")
    guesses = oracle(llm, GREEDY, PROMPTS[:3])
    llm = always(LLM(folder, "cpu", "float32"), guesses)
    want = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS[:3]]
    decoder = engine(llm)._decoder
    logits = decoder.logits
    seen = [0]

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden).clone()
        seen[0] += 1
        if seen[0] == 4:
            out[0] = torch.nan
        return out

    decoder.logits = broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match="finite") as failed:
        llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    outputs = failed.value.outputs  # type: ignore[attr-defined]
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "length"]
    assert [o.outputs[0].token_ids for o in outputs[1:]] == want[1:]
    check_scheduler(engine(llm)._scheduler)
    assert llm.metrics().kv_usage == 0
