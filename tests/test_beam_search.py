"""Beams are scored by the model, and are the best that a search without a cache finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, BeamSearchParams, SamplingParams
from lowbit.runtime.sampling.beams import beam_ways
from transformers import AutoModelForCausalLM

from .runtime_models import EOS, FAMILIES, save_tiny

PROMPTS = ["A prompt of more than one block, for beams to share.", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["qwen2"]())


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, "cpu", "float32")


def plain_beams(
    hf: Any, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """The search as vLLM describes it, without a cache and to the last step: (output, score)."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    over: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        ways = []
        for output, total in beams:
            with torch.inference_mode():
                logits = hf(torch.tensor([prompt + output])).logits[0, -1]
            top = torch.log_softmax(logits.double(), -1).topk(2 * params.beam_width)
            for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                way = ([*output, token], total + value)
                (over if token == EOS and not params.ignore_eos else ways).append(way)
        beams = sorted(ways, key=lambda way: -way[1])[: params.beam_width]
    scored = [(t, total / len(t) ** params.length_penalty) for t, total in over + beams]
    return sorted(scored, key=lambda s: -s[1])[: params.beam_width]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -0.5])
def test_the_beams_are_those_of_a_search_without_a_cache(llm, hf, width, penalty):
    params = BeamSearchParams(width, max_tokens=9, length_penalty=penalty)
    for prompt, out in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = llm.tokenizer(prompt)["input_ids"]
        expected = plain_beams(hf, ids, params)
        assert [s.tokens for s in out.sequences] == [ids + tokens for tokens, _ in expected]
        assert [s.score for s in out.sequences] == pytest.approx([s for _, s in expected], abs=1e-4)
        for sequence in out.sequences:
            ended = sequence.tokens[-1] == EOS
            assert sequence.finish_reason == ("stop" if ended else "length")
            assert ended or len(sequence.tokens) == len(ids) + 9
            output = sequence.tokens[len(ids) :]
            assert sequence.text == llm.tokenizer.decode(output, skip_special_tokens=True)


def test_some_of_those_beams_end_early(llm):
    params = BeamSearchParams(5, max_tokens=9, length_penalty=-0.5)
    sequences = [s for out in llm.beam_search(PROMPTS, params) for s in out.sequences]
    assert {s.finish_reason for s in sequences} == {"stop", "length"}


def test_without_ends_the_beams_are_those_of_transformers(llm, hf):
    ids = llm.tokenizer(PROMPTS[0])["input_ids"]
    row = torch.tensor([ids])
    expected = hf.generate(
        row, attention_mask=torch.ones_like(row), num_beams=4, num_return_sequences=4,
        max_new_tokens=12, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    (out,) = llm.beam_search(PROMPTS[0], BeamSearchParams(4, 12, ignore_eos=True))
    assert [s.tokens for s in out.sequences] == expected.tolist()


def test_one_beam_is_greedy(llm):
    (out,) = llm.beam_search("x", BeamSearchParams(1, 15, ignore_eos=True))
    greedy = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    expected = llm.generate("x", greedy, use_tqdm=False)[0].outputs[0].token_ids
    assert out.sequences[0].tokens[-15:] == expected


def test_beams_in_chunks_preempted_or_without_a_prefix_cache_are_the_same(folder, llm):
    params = BeamSearchParams(3, 30, ignore_eos=True)

    def tokens(searching: LLM) -> list[list[list[int]]]:
        outs = searching.beam_search(PROMPTS * 2, params)
        return [[s.tokens for s in out.sequences] for out in outs]

    expected = tokens(llm)
    pools = llm._engine._kv.pools
    block = sum(p.nbytes // len(p.codes) for pair in pools for p in pair)
    for options in (
        {"max_num_batched_tokens": 4, "max_num_seqs": 3},
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "kv_memory": 20 * block},
    ):
        other = LLM(folder, "cpu", "float32", **options)
        assert tokens(other) == expected
        assert other.metrics().kv_usage == 0
        assert (other.metrics().preemptions > 0) == ("kv_memory" in options)


def test_ways_that_end_are_told_apart():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]))
    ways, over = beam_ways(logits, torch.tensor([0.0, -0.1]).double(), torch.tensor([3]), 2)
    assert list(zip(ways.parents.tolist(), ways.tokens.tolist(), strict=True)) == [(0, 0), (0, 1)]
    assert list(zip(over.parents.tolist(), over.tokens.tolist(), strict=True)) == [(1, 3), (0, 3)]
    assert over.scores[0].item() == pytest.approx(torch.tensor(0.4).log().item() - 0.1)


def test_what_beams_need_is_said(folder):
    contiguous = LLM(folder, "cpu", "float32", engine="contiguous")
    with pytest.raises(UserError, match="beam search needs the paged engine.*was not chosen"):
        contiguous.beam_search("x", BeamSearchParams(2, 3))
    narrow = LLM(folder, "cpu", "float32", max_num_seqs=2)
    with pytest.raises(UserError, match="3 continuations, and max_num_seqs is 2"):
        narrow.beam_search("x", BeamSearchParams(3, 3))
    assert len(narrow.beam_search("x", BeamSearchParams(2, 3))[0].sequences) == 2
