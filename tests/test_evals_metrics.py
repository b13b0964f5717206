"""Perplexity and divergence against plain references, on models small enough to write out."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.calib.text import load_text, load_tokenizer, tokenize
from lowbit.evals.divergence import divergence, quantile
from lowbit.evals.estimate import ratio_estimate
from lowbit.evals.perplexity import Scorer, perplexity
from lowbit.evals.scorer import TransformersScorer, load_scorer
from lowbit.evals.windows import Bos, Window, Windowing, cut_windows
from lowbit.kernels.errors import UserError
from torch import Tensor
from torch.nn import functional as F

VOCABULARY = 97


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained model to measure")
    return Path(folder)


def tiny_llama(seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def models() -> tuple[Scorer, Scorer]:
    """A random model and the same with every weight moved a little."""
    base, moved = tiny_llama(), tiny_llama()
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(torch.randn(p.shape) * 0.03)
    return TransformersScorer(base), TransformersScorer(moved)


def tokens(n: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def windows_of(ids: Tensor, ctx: int, stride: int, bos: Bos = "none") -> list[Window]:
    return cut_windows(ids, Windowing(ctx, stride, bos, windows=None), bos_token_id=0)


def uniform(ids: Tensor) -> Tensor:
    return torch.full((ids.shape[1], VOCABULARY), 3.0)


def judged(base: Scorer, model: Scorer, ids: Tensor, ctx: int) -> dict[str, Any]:
    """The protocol by which quantizers are compared, written out: windows that do not overlap, no
    special tokens, likelihood of all but a window's first token, divergence at every position."""
    nll, kld, same = [], [], []
    for w in ids[: len(ids) // ctx * ctx].view(-1, ctx):
        p, q = (m(w[None]).float().log_softmax(-1) for m in (base, model))
        nll.append(-q[:-1].gather(1, w[1:, None])[:, 0].double())
        kld.append((p.exp() * (p - q)).sum(-1).double())
        same.append(p.argmax(-1) == q.argmax(-1))
    return {
        "nll": torch.stack(nll),
        "kld": torch.cat(kld).numpy(),
        "top1": torch.cat(same).double().mean().item(),
    }


def test_both_measures_equal_the_written_out_protocol(models: tuple[Scorer, Scorer]) -> None:
    base, model = models
    ids = tokens(5 * 40 + 11)
    windows, want = windows_of(ids, 40, 40), judged(base, model, ids, 40)
    assert len(windows) == 5
    got = perplexity(model, windows)
    assert got.perplexity == pytest.approx(math.exp(want["nll"].mean()), rel=1e-9)
    assert (got.tokens, got.windows) == (5 * 39, 5)
    far = divergence(base, model, windows)
    assert far.kld_mean == pytest.approx(want["kld"].mean(), rel=1e-6)
    assert far.kld_median == pytest.approx(np.quantile(want["kld"], 0.5), rel=1e-6)
    assert far.kld_p99 == pytest.approx(np.quantile(want["kld"], 0.99), rel=1e-6)
    assert far.kld_max == pytest.approx(want["kld"].max(), rel=1e-6)
    assert far.top1 == want["top1"]
    assert 0 < far.kld_median < far.kld_mean < far.kld_p99 < far.kld_max
    assert 0 < far.top1 < 1
    assert far.positions == 5 * 40


def test_chunks_of_positions_change_nothing(
    models: tuple[Scorer, Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = windows_of(tokens(128), 64, 64)
    whole = perplexity(models[1], windows), divergence(*models, windows)
    for module in ("perplexity", "divergence"):
        monkeypatch.setattr(f"lowbit.evals.{module}.CHUNK", 7)
    assert perplexity(models[1], windows) == whole[0]
    assert divergence(*models, windows) == whole[1]


def test_a_uniform_models_perplexity_is_its_vocabulary() -> None:
    got = perplexity(uniform, windows_of(tokens(100), 20, 10))
    assert got.perplexity == pytest.approx(VOCABULARY, rel=1e-6)
    assert got.nll_stderr == pytest.approx(0.0, abs=1e-6)


def test_a_model_does_not_diverge_from_itself(models: tuple[Scorer, Scorer]) -> None:
    got = divergence(models[0], models[0], windows_of(tokens(128), 32, 32))
    assert (got.kld_mean, got.kld_median, got.kld_p99, got.kld_max) == (0, 0, 0, 0)
    assert (got.top1, got.nll_difference, got.nll_difference_stderr) == (1, 0, 0)


def test_divergence_has_a_direction_and_never_falls_below_zero(
    models: tuple[Scorer, Scorer],
) -> None:
    base, model = models
    windows = windows_of(tokens(128), 32, 32)
    there, back = divergence(base, model, windows), divergence(model, base, windows)
    assert there.kld_mean != back.kld_mean
    assert there.nll_difference == pytest.approx(-back.nll_difference)
    from_uniform = divergence(uniform, base, windows)
    log_probs = torch.cat([base(w.ids[None]).log_softmax(-1) for w in windows])
    want = -math.log(VOCABULARY) - log_probs.double().mean().item()
    assert from_uniform.kld_mean == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("ctx", "stride"), [(32, 8), (32, 31), (32, 1), (16, 16)])
def test_the_sliding_window_is_the_one_of_transformers_recipe(ctx: int, stride: int) -> None:
    """huggingface.co/docs/transformers/perplexity: labels of tokens seen before are -100."""
    model = tiny_llama()
    ids = tokens(ctx + 5 * stride)
    nll_sum, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + ctx, len(ids))
        target = end - previous_end
        row = ids[begin:end][None]
        labels = row.clone()
        labels[:, :-target] = -100
        with torch.no_grad():
            loss = model(row, labels=labels).loss
        scored = int((labels[:, 1:] != -100).sum())
        nll_sum, count, previous_end = nll_sum + loss.item() * scored, count + scored, end
        if end == len(ids):
            break
    got = perplexity(TransformersScorer(model), windows_of(ids, ctx, stride))
    assert got.tokens == count
    assert got.perplexity == pytest.approx(math.exp(nll_sum / count), rel=1e-6)


@settings(deadline=None)
@given(
    n=st.integers(0, 80),
    ctx=st.integers(2, 20),
    stride=st.integers(1, 20),
    bos=st.sampled_from(get_args(Bos)),
    limit=st.none() | st.integers(1, 5),
)
def test_windows_score_each_token_once(
    n: int, ctx: int, stride: int, bos: Bos, limit: int | None
) -> None:
    ids = torch.arange(100, 100 + n)
    if stride > ctx:
        with pytest.raises(UserError, match=f"from 1 to ctx = {ctx}, got {stride}"):
            Windowing(ctx, stride, bos, limit)
        return
    windowing = Windowing(ctx, stride, bos, limit)
    if n < ctx:
        with pytest.raises(UserError, match=f"{n} tokens, fewer than one window of ctx = {ctx}"):
            cut_windows(ids, windowing, 0)
        return
    windows = cut_windows(ids, windowing, 0)
    assert len(windows) == min((n - ctx) // stride + 1, limit or n)
    scored = [int(t) for w in windows for t in w.ids[w.first_scored :]]
    lost = {100 + i * stride for i in range(len(windows))} if stride == ctx else {100}
    last = 100 + (len(windows) - 1) * stride + ctx
    assert scored == [t for t in range(100, last) if t not in lost]
    firsts = [int(w.ids[0]) for w in windows]
    plain = [100 + i * stride for i in range(len(windows))]
    wanted = {"none": plain, "first": [0, *plain[1:]], "each": [0] * len(plain)}
    assert firsts == wanted[bos]
    assert sum(ctx - w.fresh for w in windows) == last - 100


def test_the_bos_rule_changes_what_is_seen_not_what_is_scored(
    models: tuple[Scorer, Scorer],
) -> None:
    rules: tuple[Bos, ...] = get_args(Bos)
    got = {bos: perplexity(models[0], windows_of(tokens(96), 32, 32, bos)) for bos in rules}
    assert len({g.tokens for g in got.values()}) == 1
    assert len({g.nll for g in got.values()}) == 3
    with pytest.raises(UserError, match="no BOS token"):
        cut_windows(tokens(9), Windowing(4, 4, "each"), None)


def test_windows_read_no_further_than_they_say() -> None:
    windowing = Windowing(16, 4, windows=3)
    ids = tokens(200)
    assert windowing.tokens == 24
    assert torch.equal(
        torch.stack([w.ids for w in cut_windows(ids[: windowing.tokens], windowing, None)]),
        torch.stack([w.ids for w in cut_windows(ids, windowing, None)]),
    )


def test_skipped_positions_are_context_alone() -> None:
    windows = cut_windows(tokens(64), Windowing(16, 16, windows=None, skip=10), None)
    assert [w.fresh for w in windows] == [10] * 4
    overlapping = cut_windows(tokens(64), Windowing(16, 4, windows=3, skip=10), None)
    assert [w.fresh for w in overlapping] == [10, 12, 12]
    with pytest.raises(UserError, match="skip must be"):
        Windowing(16, 16, skip=16)


@pytest.mark.parametrize(
    ("ctx", "stride", "bos", "windows", "message"),
    [
        (1, 1, "none", 1, "ctx must be at least 2"),
        (8, 0, "none", 1, "stride must be from 1"),
        (8, 8, "none", 0, "windows must be at least 1"),
        (8, 8, "all", 1, "bos must be one of none, first, each"),
    ],
)
def test_impossible_protocols_are_refused(
    ctx: int, stride: int, bos: Any, windows: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Windowing(ctx, stride, bos, windows)


def test_standard_error_by_hand() -> None:
    """Windows of 2 and 4 tokens with sums 3 and 9: mean 12/6 = 2, residuals 3-4 = -1, 9-8 = 1."""
    got = ratio_estimate([3.0, 9.0], [2, 4])
    assert got.mean == 2.0
    assert got.stderr == pytest.approx(math.sqrt(2 / 1 * (1 + 1)) / 6)
    assert ratio_estimate([3.0], [2]) == (1.5, None)


def test_standard_errors_are_those_of_the_window_means(models: tuple[Scorer, Scorer]) -> None:
    base, model = models
    ids = tokens(6 * 30)
    windows = windows_of(ids, 30, 30)
    means = judged(base, model, ids, 30)["nll"].mean(1)
    got, far = perplexity(model, windows), divergence(base, model, windows)
    assert got.nll_stderr == pytest.approx((means.std() / math.sqrt(6)).item(), rel=1e-6)
    assert got.perplexity_stderr == pytest.approx(got.perplexity * (got.nll_stderr or 0))
    paired = means - judged(base, base, ids, 30)["nll"].mean(1)
    assert far.nll_difference == pytest.approx(paired.mean().item(), rel=1e-6)
    assert far.nll_difference_stderr == pytest.approx(
        (paired.std() / math.sqrt(6)).item(), rel=1e-6
    )
    assert (far.nll_difference_stderr or 1) < (got.nll_stderr or 0)
    klds = torch.tensor(judged(base, model, ids, 30)["kld"]).view(6, 30).mean(1)
    assert far.kld_mean_stderr == pytest.approx((klds.std() / math.sqrt(6)).item(), rel=1e-6)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], q: float) -> None:
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    assert quantile(ordered, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-12)


def test_logits_that_are_not_finite_are_an_error() -> None:
    def broken(ids: Tensor) -> Tensor:
        logits = torch.zeros(ids.shape[1], VOCABULARY)
        logits[3, 5] = math.nan
        return logits

    with pytest.raises(UserError, match="not finite"):
        perplexity(broken, windows_of(tokens(16), 8, 8))


def test_vocabularies_must_agree(models: tuple[Scorer, Scorer]) -> None:
    other = TransformersScorer(tiny_llama(vocabulary=VOCABULARY + 3))
    with pytest.raises(UserError, match="vocabulary of 97 and the model one of 100"):
        divergence(models[0], other, windows_of(tokens(16), 8, 8))
    narrow = TransformersScorer(tiny_llama(vocabulary=50))
    with pytest.raises(UserError, match="has 50 embeddings"):
        perplexity(narrow, windows_of(tokens(64), 64, 64))


def test_half_precision_logits_are_measured_in_float32() -> None:
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()
    window = windows_of(tokens(8), 8, 8)
    want = F.cross_entropy(logits[:-1].float(), window[0].ids[1:])
    assert perplexity(lambda ids: logits.clone(), window).nll == pytest.approx(want.item())


def test_a_trained_model_knows_its_stories(data: Path) -> None:
    folder = data / "stories260k"
    tokenizer = load_tokenizer(folder)
    text = load_text(str(data / "text" / "tinystories_valid.txt"), "evaluation")
    windowing = Windowing(256, 256, windows=4)
    ids = tokenize(text.text, tokenizer, windowing.tokens)
    scorer = load_scorer(folder)
    stories = perplexity(scorer, cut_windows(ids, windowing, tokenizer.bos_token_id))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    shuffled = perplexity(scorer, cut_windows(ids[order], windowing, None))
    assert 2 < stories.perplexity < 10
    assert shuffled.perplexity > 20 * stories.perplexity


@pytest.mark.slow
def test_real_text_judged_by_the_formula(data: Path) -> None:
    """The comparison protocol at its context, on a trained model and the same in bfloat16."""
    base = load_scorer(data / "stories260k")
    rounded = load_scorer(data / "stories260k", "bfloat16")
    ids = tokenize(
        (data / "wikitext-2" / "test.txt").read_text(encoding="utf-8"),
        load_tokenizer(data / "stories260k"),
        6 * 512,
    )
    windows, want = windows_of(ids, 512, 512), judged(base, rounded, ids, 512)
    got, far = perplexity(rounded, windows), divergence(base, rounded, windows)
    assert got.perplexity == pytest.approx(math.exp(want["nll"].mean()), abs=1e-4)
    assert far.kld_mean == pytest.approx(want["kld"].mean(), abs=1e-6)
    assert far.top1 == want["top1"]
    assert 0 < far.kld_mean < 0.1
