"""The sampler's cuts and draws, and that a row does not see its neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import UserError
from lowbit.runtime import BeamSearchParams, SamplingParams, StructuredOutputsParams, sampler
from lowbit.runtime.sampler import (
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    probabilities,
    sample,
    sampling_batch,
)
from lowbit.runtime.sampling.philox import as_int64, philox4x32, uniforms

CPU = torch.device("cpu")
seeds = st.integers(0, 2**64 - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 40, 10_000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def numbers(seed: int, count: int) -> torch.Tensor:
    """float64 [count], of the first steps."""
    steps = torch.arange(count)
    return uniforms(as_int64([seed] * count), steps, torch.zeros_like(steps))[:, 0]


def random_logits(seed: int, rows: int, vocabulary: int, ties: bool = False) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed % 2**63)
    logits = torch.randn(rows, vocabulary, generator=g) * 3
    return logits.round() if ties else logits


def random_probs(seed: int, rows: int, vocabulary: int, ties: bool = False) -> torch.Tensor:
    return torch.softmax(random_logits(seed, rows, vocabulary, ties).double(), -1)


@settings(deadline=None, max_examples=80)
@given(seed=seeds, vocabulary=st.integers(1, 300), k=st.integers(1, 320), ties=st.booleans())
def test_top_k_keeps_exactly_k_of_the_largest(seed, vocabulary, k, ties):
    probs = random_probs(seed, 2, vocabulary, ties)
    kept = keep_top_k(probs, torch.tensor([k, 0]), k)
    assert torch.equal(kept[1], probs[1])
    alive = kept[0] > 0
    assert int(alive.sum()) == min(k, vocabulary)
    assert kept[0].sum().item() == pytest.approx(1)
    if not alive.all():
        assert probs[0][alive].min() >= probs[0][~alive].max()
    ratio = kept[0][alive] / probs[0][alive]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


@settings(deadline=None, max_examples=80)
@given(
    seed=seeds,
    vocabulary=st.integers(1, 300),
    top_p=st.floats(0.01, 1, exclude_max=True),
    ties=st.booleans(),
)
def test_top_p_keeps_the_fewest_that_reach_the_mass(seed, vocabulary, top_p, ties):
    probs = random_probs(seed, 2, vocabulary, ties)
    kept = keep_top_p(probs, torch.tensor([top_p, 1.0], dtype=torch.float64))
    assert torch.equal(kept[1], probs[1])
    alive = kept[0] > 0
    mass = probs[0][alive].sum().item()
    smallest = probs[0][alive].min().item()
    assert mass >= top_p - 1e-12
    assert mass - smallest < top_p + 1e-12  # without its last token it would fall short
    if not alive.all():
        assert smallest >= probs[0][~alive].max()
    assert kept[0].sum().item() == pytest.approx(1)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, top_p=st.floats(0.01, 1), ties=st.booleans())
def test_top_p_keeps_the_same_where_the_whole_row_is_sorted(seed, top_p, ties):
    probs, given_p = random_probs(seed, 3, 300, ties), torch.full((3,), top_p).double()
    kept = keep_top_p(probs, given_p)
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU
        patch.setattr(sampler, "_falling", lambda p, _: p.sort(dim=-1, descending=True).values)
        assert torch.equal(keep_top_p(probs, given_p), kept)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, choices=st.lists(params, min_size=1, max_size=6), ties=st.booleans())
def test_a_row_does_not_depend_on_its_batch(seed, choices, ties):
    logits = random_logits(seed, len(choices), 200, ties)
    drawn = numbers(seed, len(choices))
    together = sample(logits, sampling_batch(choices, CPU), drawn)
    for i, choice in enumerate(choices):
        alone = sample(logits[i : i + 1], sampling_batch([choice], CPU), drawn[i : i + 1])
        assert alone.item() == together[i].item()


@settings(deadline=None, max_examples=60)
@given(seed=seeds, choice=params, u=st.floats(0, 1, exclude_max=True))
def test_the_drawn_token_was_not_cut_off(seed, choice, u):
    logits = random_logits(seed, 1, 100)
    batch = sampling_batch([choice], CPU)
    token = sample(logits, batch, torch.tensor([u], dtype=torch.float64))
    if choice.temperature == 0:
        assert token.item() == logits.argmax().item()
    else:
        assert probabilities(logits, batch)[0, token.item()] > 0


@pytest.mark.parametrize("choice", [SamplingParams(top_k=1), SamplingParams(top_p=1e-6)], ids=str)
def test_the_narrowest_cut_is_greedy(choice):
    logits = random_logits(1, 5, 100)
    drawn = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.99], dtype=torch.float64)
    tokens = sample(logits, sampling_batch([choice] * 5, CPU), drawn)
    assert torch.equal(tokens, logits.argmax(-1))


def test_draws_follow_the_distribution():
    probs = torch.tensor([[0.5, 0.0, 0.3, 0.2]], dtype=torch.float64)
    n = 4000
    counts = draw(probs.expand(n, -1), numbers(7, n)).bincount(minlength=4) / n
    # 4 standard deviations of a proportion near 0.5
    torch.testing.assert_close(counts.double(), probs[0], atol=4 * 0.5 / n**0.5, rtol=0)
    assert counts[1] == 0


def test_temperature_divides_the_logits():
    logits = random_logits(3, 1, 50)
    batch = sampling_batch([SamplingParams(temperature=0.25)], CPU)
    expected = torch.softmax(logits.double() / 0.25, -1)
    torch.testing.assert_close(probabilities(logits, batch), expected)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers that come with Random123, by the generator's authors."""

    def row(text: str) -> torch.Tensor:
        return torch.tensor([[int(word, 16) for word in text.split()]])

    assert philox4x32(row(counter), row(key)).tolist() == row(words).tolist()


def test_uniforms_are_of_seed_step_and_continuation_alone():
    seeds = as_int64([5, 2**64 - 1, 5, 5, 2**63])
    steps, streams = torch.tensor([0, 0, 1, 0, 2**33]), torch.tensor([0, 0, 0, 1, 0])
    together = uniforms(seeds, steps, streams)
    assert len(set(together.flatten().tolist())) == 10
    assert together.min() >= 0 and together.max() < 1
    for i in range(5):
        part = slice(i, i + 1)
        assert torch.equal(uniforms(seeds[part], steps[part], streams[part]), together[part])


def test_uniforms_are_uniform():
    u = numbers(3, 20_000)
    assert abs(u.mean().item() - 0.5) < 4 * (1 / 12 / 20_000) ** 0.5
    counts = (u * 16).long().bincount(minlength=16).double()
    chi_square = ((counts - 1250) ** 2 / 1250).sum().item()
    assert chi_square < 44.3, "p < 1e-4 for 15 degrees of freedom"


@settings(deadline=None, max_examples=60)
@given(seed=seeds, vocabulary=st.integers(1, 300), min_p=st.floats(0.001, 1))
def test_min_p_keeps_what_is_near_the_likeliest(seed, vocabulary, min_p):
    probs = random_probs(seed, 2, vocabulary)
    kept = keep_min_p(probs, torch.tensor([min_p, 0.0], dtype=torch.float64))
    assert torch.equal(kept[1], probs[1])
    assert torch.equal(kept[0] > 0, probs[0] >= min_p * probs[0].max())
    assert kept[0].sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -0.1}, "temperature.*-0.1"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": float("inf")}, "temperature.*inf"),
        ({"top_p": 0.0}, "top_p.*0.0"),
        ({"top_p": 1.5}, "top_p.*1.5"),
        ({"top_k": -2}, "top_k.*-2"),
        ({"max_tokens": 0}, "max_tokens.*0"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"seed": -1}, "seed.*-1"),
        ({"seed": 2**64}, "seed"),
        ({"seed": True}, "seed.*True"),
        ({"max_tokens": 2.5}, "max_tokens.*2.5"),
        ({"max_tokens": "5"}, "max_tokens.*'5'"),
        ({"n": 0}, "n must be.*0"),
        ({"n": 2, "temperature": 0}, "n is 2 and temperature 0"),
        ({"min_p": -0.1}, "min_p.*-0.1"),
        ({"min_p": 1.1}, "min_p.*1.1"),
        ({"presence_penalty": 2.5}, "presence_penalty.*2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty.*nan"),
        ({"repetition_penalty": 0}, "repetition_penalty.*0"),
        ({"min_tokens": 17}, "min_tokens is 17, more than max_tokens, 16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"logit_bias": {1: 101}}, "logit_bias.*1: 101"),
        ({"logit_bias": {"1": 1}}, "logit_bias.*'1': 1"),
        ({"logprobs": -2}, "logprobs.*-2"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs.*1.0"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be"),
    ],
    ids=str,
)
def test_sampling_params_name_value_and_limit(bad, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "exactly one.*got none"),
        ({"regex": "a", "json": "{}"}, "got json, regex"),
        ({"regex": 3}, "regex must be a string"),
        ({"json": 3}, "json must be a schema"),
        ({"choice": "ab"}, "choice must be strings"),
        ({"choice": []}, "choice must be strings"),
    ],
    ids=str,
)
def test_structured_outputs_are_asked_for_one_way(bad, message):
    with pytest.raises(UserError, match=message):
        StructuredOutputsParams(**bad)


def test_structured_outputs_end_by_themselves():
    with pytest.raises(UserError, match="ignore_eos and min_tokens"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width.*0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens.*0"),
        ({"beam_width": 2, "max_tokens": 1, "length_penalty": float("inf")}, "length_penalty.*inf"),
    ],
    ids=str,
)
def test_beam_search_params_name_value_and_limit(bad, message):
    with pytest.raises(UserError, match=message):
        BeamSearchParams(**bad)
