"""Verified draws have the model's own distribution: chi-square tests over a small vocabulary.

Each test also shows that it would find the draft's distribution in the target's place.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.paged_engine import PagedEngine
from lowbit.runtime.sampler import accept_or_draw, draw, probabilities, sampling_batch
from lowbit.runtime.sampling.philox import as_int64, uniforms
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from .runtime_models import save_tiny
from .test_speculation import always

DRAWS = 20000
CPU = torch.device("cpu")


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """How likely counts [outcomes] are at least as far from probs as they are, by chance."""
    expected = probs * counts.sum()
    order = expected.argsort()
    rare = expected[order].cumsum(0) < 5  # these count as one outcome
    rare_ones, others = order[rare], order[~rare]
    expected = torch.cat([expected[others], expected[rare_ones].sum()[None]])
    counts = torch.cat([counts[others], counts[rare_ones].sum()[None]]).double()
    kept = expected > 0
    assert not counts[~kept].any(), "what cannot come has come"
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def numbers(count: int, purpose: int) -> Tensor:
    steps = torch.arange(count)
    return uniforms(as_int64([7] * count), steps, torch.zeros_like(steps), purpose)


@pytest.mark.parametrize(
    ("sharp", "top_k"), [(0.0, 0), (1.0, 0), (3.0, 0), (1.0, 5)], ids=lambda v: f"{v:g}"
)
def test_accepted_and_drawn_tokens_have_the_targets_distribution(sharp: float, top_k: int) -> None:
    """From drafts alike, unlike, nearly disjoint, and cut to other tokens."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 12, generator=g) * torch.tensor([[1.0], [sharp]])
    batch = sampling_batch([SamplingParams(top_k=top_k)] * 2, CPU)
    target, draft = probabilities(logits, batch)
    proposed = draw(draft.expand(DRAWS, -1), numbers(DRAWS, 1)[:, 0])
    got = accept_or_draw(
        target.expand(DRAWS, -1), draft.expand(DRAWS, -1), proposed, numbers(DRAWS, 0)
    )
    assert chi_square(got.bincount(minlength=12), target) > 0.001
    assert chi_square(proposed.bincount(minlength=12), draft) > 0.001
    if not top_k:
        assert chi_square(proposed.bincount(minlength=12), target) < 1e-6
    accepted = float((got == proposed).double().mean())
    assert accepted == pytest.approx(float(torch.minimum(target, draft).sum()), abs=0.015)


def test_equal_distributions_accept_every_token() -> None:
    probs = torch.rand(500, 9, generator=torch.Generator().manual_seed(0)).double()
    probs /= probs.sum(1, keepdim=True)
    proposed = draw(probs, numbers(500, 1)[:, 0])
    assert torch.equal(accept_or_draw(probs, probs.clone(), proposed, numbers(500, 0)), proposed)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A target and a draft over 16 tokens, without a tokenizer."""
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return tuple(  # type: ignore[return-value]
        save_tiny(tmp_path_factory.mktemp(f"m{seed}"), LlamaConfig(**sizes), seed, tokenizer=False)
        for seed in (0, 1)
    )


def exact(folder: Path, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each output of three tokens."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first = [[a, b] for a, b in itertools.product(range(16), repeat=2)]
    with torch.inference_mode():
        logits = hf(torch.tensor([prompt + tokens for tokens in first])).logits[:, -3:]
    batch = sampling_batch([params] * 3, CPU)
    found = {}
    for tokens, rows in zip(first, logits, strict=True):
        one, two, three = probabilities(rows, batch)
        for last in range(16):
            found[(*tokens, last)] = float(one[tokens[0]] * two[tokens[1]] * three[last])
    return found


@pytest.mark.parametrize("method", ["draft", "ngram", "lookahead"])
def test_outputs_of_three_tokens_have_the_targets_distribution(
    method: str, models: tuple[Path, Path]
) -> None:
    """After the first, both others come from one step or two."""
    target, draft = models
    prompt, count = [1, 5, 9, 5, 9, 5], 1500
    params = SamplingParams(max_tokens=3, temperature=1.3, top_k=6, ignore_eos=True)
    llm = LLM(
        target, "cpu", "float32", max_num_seqs=100,
        speculate=str(draft) if method == "draft" else method,
    )  # fmt: skip
    always(llm)
    each = [SamplingParams(**{**vars(params), "seed": seed}) for seed in range(count)]
    outputs = llm.generate([prompt] * count, each, use_tqdm=False)
    probs = exact(target, prompt, params)
    places = {tokens: i for i, tokens in enumerate(probs)}
    got = torch.tensor([places[tuple(o.outputs[0].token_ids)] for o in outputs])
    counts = got.bincount(minlength=len(places))
    assert sum(probs.values()) == pytest.approx(1)
    assert chi_square(counts, torch.tensor(list(probs.values()), dtype=torch.float64)) > 0.001
    of_draft = torch.tensor(list(exact(draft, prompt, params).values()), dtype=torch.float64)
    assert chi_square(counts, (of_draft + 1e-9) / (of_draft + 1e-9).sum()) < 1e-9
    told = llm.metrics().speculation
    assert isinstance(llm._engine, PagedEngine) and told is not None
    assert told.accepted > 5 and told.proposed - told.accepted > 50
