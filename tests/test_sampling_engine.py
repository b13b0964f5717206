"""What SamplingParams ask for is what both engines do, checked with transformers' own logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.paged_engine import BLOCK_SIZE, PagedEngine
from transformers import AutoModelForCausalLM

from .runtime_models import EOS, FAMILIES, VOCAB, save_tiny

PROMPT = "The same words for all, in more than two blocks of sixteen tokens."
OTHERS = ["x", "Another prompt", "And one more that is a little longer than those"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["qwen2"]())


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["paged", "contiguous"])
def llm(request, folder: Path) -> LLM:
    return LLM(folder, "cpu", "float32", engine=request.param)


def first(llm: LLM, prompt: Any = PROMPT, **asked: Any) -> Any:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 16, **asked})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def logits_of(hf: Any, token_ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary], after each of them."""
    with torch.inference_mode():
        return hf(torch.tensor([token_ids])).logits[0]


def steps(
    hf: Any, prompt: list[int], output: list[int]
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """For each token of the output, the logits it was drawn from and the output before it."""
    logits = logits_of(hf, prompt + output)
    for i in range(len(output)):
        yield logits[len(prompt) - 1 + i].clone(), output[:i]


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.8},
        {"presence_penalty": -2.0, "frequency_penalty": 0.7, "repetition_penalty": 0.6},
    ],
    ids=str,
)
def test_penalties_are_the_published_ones(llm, hf, asked):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **asked)
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    out, unchanged = llm.generate([PROMPT, PROMPT], [params, plain], use_tqdm=False)
    tokens = out.outputs[0].token_ids
    assert tokens != unchanged.outputs[0].token_ids, "they change something"
    for (logits, before), token in zip(
        steps(hf, out.prompt_token_ids, tokens), tokens, strict=True
    ):
        for seen in {*out.prompt_token_ids, *before}:
            by = params.repetition_penalty
            logits[seen] = logits[seen] / by if logits[seen] > 0 else logits[seen] * by
        for seen in set(before):
            logits[seen] -= params.presence_penalty + before.count(seen) * params.frequency_penalty
        assert logits.max() - logits[token] < 1e-3


def test_logit_bias_bans_and_forces(llm):
    plain = first(llm).token_ids
    banned = first(llm, logit_bias={plain[0]: -100}).token_ids
    assert plain[0] not in banned
    forced = first(llm, logit_bias={65: 100, 66: 99.5}, ignore_eos=True)
    assert set(forced.token_ids) == {65}


def test_min_tokens_keeps_ends_away(llm):
    ends = {EOS: 100.0}
    assert first(llm, logit_bias=ends).token_ids == [EOS]
    out = first(llm, logit_bias=ends, min_tokens=7)
    assert len(out.token_ids) == 8 and out.token_ids.index(EOS) == 7
    assert out.finish_reason == "stop"


def test_stop_token_ids_end_the_output_and_are_named(llm):
    plain = first(llm, ignore_eos=True, max_tokens=30)
    stop = plain.token_ids[9]
    at = plain.token_ids.index(stop)
    unused = next(i for i in range(VOCAB) if i not in plain.token_ids)
    out = first(llm, stop_token_ids=[stop, unused], ignore_eos=True, max_tokens=30)
    assert out.token_ids == plain.token_ids[: at + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.text == llm.tokenizer.decode(out.token_ids[:-1], skip_special_tokens=True)
    held = first(
        llm, stop_token_ids=[stop], ignore_eos=True, max_tokens=30, include_stop_str_in_output=True
    )
    assert held.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    eos = first(llm, logit_bias={EOS: 100.0})
    assert (eos.finish_reason, eos.stop_reason) == ("stop", None)


def test_stop_strings_are_cut_or_kept_and_named(llm):
    text = first(llm, max_tokens=40).text
    stop = text[8:11]
    cut = first(llm, max_tokens=40, stop=["\0", stop])
    assert cut.text == text[: text.index(stop)] and cut.stop_reason == stop
    kept = first(llm, max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert kept.text == cut.text + stop and kept.finish_reason == "stop"


def test_logprobs_are_those_of_the_models_logits(llm, hf):
    """Before temperature, bias and penalties, with the rank among all tokens."""
    params = SamplingParams(
        temperature=3.0, seed=1, max_tokens=10, logprobs=3, ignore_eos=True, presence_penalty=1.0
    )
    plain = SamplingParams(temperature=0, max_tokens=10)
    out = llm.generate([PROMPT, "y"], [params, plain], use_tqdm=False)
    assert out[1].outputs[0].logprobs is None
    completion = out[0].outputs[0]
    assert len(completion.logprobs) == 10
    total = 0.0
    rows = steps(hf, out[0].prompt_token_ids, completion.token_ids)
    for (logits, _), told, token in zip(
        rows, completion.logprobs, completion.token_ids, strict=True
    ):
        logprobs = torch.log_softmax(logits, -1)
        order = logprobs.argsort(descending=True).tolist()
        assert set(told) == {token, *order[:3]}
        for other, entry in told.items():
            assert entry.logprob == pytest.approx(logprobs[other].item(), abs=1e-4)
            assert entry.rank == order.index(other) + 1
            assert entry.decoded_token == llm.tokenizer.decode([other])
        total += told[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert len(first(llm, logprobs=-1).logprobs[0]) == VOCAB
    assert len(first(llm, logprobs=0).logprobs[0]) == 1


@pytest.mark.parametrize("chunk", [7, 2048])
def test_prompt_logprobs_are_of_every_token_in_chunks_too(folder, hf, chunk):
    llm = LLM(folder, "cpu", "float32", max_num_seqs=2, max_num_batched_tokens=chunk)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    llm.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)  # fills the prefix cache
    plain = SamplingParams(max_tokens=2, temperature=0)
    out, other = llm.generate([PROMPT, PROMPT], [params, plain], use_tqdm=False)
    assert other.prompt_logprobs is None and other.outputs == out.outputs
    ids = out.prompt_token_ids
    logprobs = torch.log_softmax(logits_of(hf, ids), -1)
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(ids)
    for i, told in enumerate(out.prompt_logprobs[1:], 1):
        assert told[ids[i]].logprob == pytest.approx(logprobs[i - 1, ids[i]].item(), abs=1e-4)
        assert set(told) == {ids[i], *logprobs[i - 1].topk(2).indices.tolist()}


def test_prompt_logprobs_of_the_contiguous_engine(folder, hf):
    llm = LLM(folder, "cpu", "float32", engine="contiguous")
    out = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    logprobs = torch.log_softmax(logits_of(hf, out.prompt_token_ids), -1)
    told = [next(iter(entry.values())).logprob for entry in out.prompt_logprobs[1:]]
    expected = [logprobs[i, t].item() for i, t in enumerate(out.prompt_token_ids[1:])]
    assert told == pytest.approx(expected, abs=1e-4)


def test_continuations_differ_and_each_is_the_same_in_any_batch(folder, llm):
    """From both engines, alone or beside others, with one row or many."""
    asked = SamplingParams(n=3, temperature=1.2, seed=11, max_tokens=20, ignore_eos=True)
    expected = llm.generate(PROMPT, asked, use_tqdm=False)[0].outputs
    assert [o.index for o in expected] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in expected}) == 3
    for options in ({"max_num_batched_tokens": 5, "max_num_seqs": 4}, {"engine": "contiguous"}):
        other = LLM(folder, "cpu", "float32", **options)
        outs = other.generate([*OTHERS, PROMPT], asked, use_tqdm=False)
        assert outs[-1].outputs == expected
    alone = SamplingParams(temperature=1.2, seed=11, max_tokens=20, ignore_eos=True)
    assert llm.generate(PROMPT, alone, use_tqdm=False)[0].outputs[0] == expected[0]


def test_continuations_share_the_blocks_of_their_prompt(folder):
    llm = LLM(folder, "cpu", "float32", enable_prefix_caching=False)
    engine = llm._engine
    assert isinstance(engine, PagedEngine)
    n, used = 4, []
    request = llm._maker.request(
        PROMPT, SamplingParams(n=n, seed=1, max_tokens=BLOCK_SIZE, ignore_eos=True)
    )
    engine.add(request)
    while not request.finished:
        engine.step()
        used.append(engine._scheduler.stats().kv.blocks_in_use)
    prompt = len(request.prompt_token_ids)
    assert prompt % BLOCK_SIZE, "the last block of the prompt is copied when it is written to"
    shared = prompt // BLOCK_SIZE
    most = shared + n * (-(-(prompt + BLOCK_SIZE - 1) // BLOCK_SIZE) - shared)
    assert shared + n <= max(used) <= most < n * -(-prompt // BLOCK_SIZE)
    assert used[-1] == 0


def test_preempted_continuations_give_the_same_tokens(folder):
    asked = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    prompts = [PROMPT, *OTHERS]
    roomy = LLM(folder, "cpu", "float32")
    expected = [o.outputs for o in roomy.generate(prompts, asked, use_tqdm=False)]
    pools = roomy._engine._kv.pools  # type: ignore[union-attr]
    block = sum(p.nbytes // len(p.codes) for pair in pools for p in pair)
    tight = LLM(folder, "cpu", "float32", kv_memory=block * 14, enable_prefix_caching=False)
    outs = tight.generate(prompts, asked, use_tqdm=False)
    assert [o.outputs for o in outs] == expected
    assert tight.metrics().preemptions > 0 and tight.metrics().kv_usage == 0
    assert sum(o.metrics.preemptions for o in outs) == tight.metrics().preemptions


def test_unknown_ids_and_too_many_continuations_are_refused(folder, llm):
    for asked in ({"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": [VOCAB]}):
        with pytest.raises(UserError, match=f"token id {VOCAB}.*vocabulary of {VOCAB}"):
            first(llm, **asked)
    with pytest.raises(UserError, match="stream takes n = 1, got 2"):
        list(llm.stream("x", SamplingParams(n=2)))
    narrow = LLM(folder, "cpu", "float32", max_num_seqs=2)
    with pytest.raises(UserError, match="3 continuations, and max_num_seqs is 2"):
        first(narrow, n=3, temperature=1)


def test_metrics_add_up(folder):
    llm = LLM(folder, "cpu", "float32")
    asked = SamplingParams(n=2, temperature=1, max_tokens=9, ignore_eos=True)
    out = llm.generate(PROMPT, asked, use_tqdm=False)[0]
    told = out.metrics
    assert (told.output_tokens, told.decode_tokens, len(told.itl)) == (18, 16, 16)
    assert told.cached_tokens == 0 and told.preemptions == 0
    assert 0 <= told.queue_seconds < told.ttft < told.seconds
    assert sum(told.itl[:8]) == pytest.approx(told.tpot * 8, rel=0.5)
    assert told.ttft + sum(told.itl[:8]) == pytest.approx(told.seconds, rel=0.2)
    again = llm.generate(PROMPT, asked, use_tqdm=False)[0].metrics
    blocks = (told.prefill_tokens - 1) // BLOCK_SIZE
    assert again.cached_tokens == blocks * BLOCK_SIZE
    engine = llm.metrics()
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0)
    assert engine.hit_rate == pytest.approx(again.cached_tokens / (2 * told.prefill_tokens))
    assert engine.output_tokens == 36 and engine.tokens_per_second > 0
