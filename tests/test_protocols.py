"""Named protocols against the loops that others publish, written out here, and llama.cpp."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.text import load_text, load_tokenizer, tokenize
from lowbit.evals.divergence import divergence
from lowbit.evals.measure import measure_models, text_ids
from lowbit.evals.perplexity import perplexity
from lowbit.evals.protocols import PROTOCOLS, Tokenizing, named_windowing, tokenizing, windowing_for
from lowbit.evals.scorer import TransformersScorer, load_scorer
from lowbit.evals.windows import Window, Windowing, cut_windows
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.eval import NAMED, evaluate
from torch import Tensor, nn
from typer.testing import CliRunner

BOS = 1


@pytest.fixture(scope="module")
def stories() -> Path:
    folder = os.environ.get("LOWBIT_TEST_DATA")
    if not folder:
        pytest.skip("LOWBIT_TEST_DATA is not set: no trained model to measure")
    return Path(folder) / "stories260k"


@pytest.fixture(scope="module")
def text(stories: Path) -> str:
    file = stories.parent / "text" / "tinystories_valid.txt"
    return load_text(str(file), "evaluation").text[:9000]


def llama(positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=positions, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def random_ids(n: int) -> Tensor:
    ids = torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(1))
    ids[0] = BOS
    return ids


def windows_of(ids: Tensor, windowing: Windowing) -> list[Window]:
    return cut_windows(ids, windowing, BOS)


@torch.no_grad()
def gptq_loop(model: Any, ids: Tensor, seqlen: int = 2048) -> float:
    """The perplexity of GPTQ's code and of the many that took it over."""
    nlls = []
    samples = len(ids) // seqlen
    for i in range(samples):
        batch = ids[None, i * seqlen : (i + 1) * seqlen]
        logits = model(batch).logits
        loss = nn.CrossEntropyLoss()(logits[0, :-1].float(), batch[0, 1:])
        nlls.append(loss.float() * seqlen)
    return torch.exp(torch.stack(nlls).sum() / (samples * seqlen)).item()


@torch.no_grad()
def transformers_recipe(model: Any, ids: Tensor, max_length: int, stride: int) -> float:
    """huggingface.co/docs/transformers/perplexity."""
    nll_sum, n_tokens, prev_end_loc = 0.0, 0, 0
    for begin_loc in range(0, len(ids), stride):
        end_loc = min(begin_loc + max_length, len(ids))
        trg_len = end_loc - prev_end_loc
        input_ids = ids[None, begin_loc:end_loc]
        target_ids = input_ids.clone()
        target_ids[:, :-trg_len] = -100
        neg_log_likelihood = model(input_ids, labels=target_ids).loss
        num_loss_tokens = (target_ids != -100).sum().item() - 1
        nll_sum += neg_log_likelihood.item() * num_loss_tokens
        n_tokens += num_loss_tokens
        prev_end_loc = end_loc
        if end_loc == len(ids):
            break
    return math.exp(nll_sum / n_tokens)


@torch.no_grad()
def llama_perplexity_loop(model: Any, ids: Tensor, n_ctx: int = 512) -> float:
    """llama.cpp's tools/perplexity: the second half of each chunk, its last token never an input
    to a prediction."""
    nll, count = 0.0, 0
    for i in range(len(ids) // n_ctx):
        tokens = ids[i * n_ctx : (i + 1) * n_ctx].clone()
        tokens[0] = BOS
        logits = model(tokens[None]).logits[0].float()
        for j in range(n_ctx // 2, n_ctx - 1):
            nll -= logits[j].log_softmax(-1)[tokens[j + 1]].item()
            count += 1
    return math.exp(nll / count)


def test_hf_2048_is_the_loop_of_gptq() -> None:
    model, ids = llama(2048), random_ids(3 * 2048 + 500)
    windowing = named_windowing("hf-2048", 2048, Tokenizing((BOS,), BOS))
    got = perplexity(TransformersScorer(model), windows_of(ids, windowing))
    assert got.perplexity == pytest.approx(gptq_loop(model, ids), rel=1e-5)
    assert got.windows == 3 and got.tokens == 3 * 2047


def test_hf_stride_is_the_recipe_of_transformers(stories: Path, text: str) -> None:
    tokenizer, scorer = load_tokenizer(stories), load_scorer(stories)
    windowing = windowing_for("hf-stride", [stories], tokenizer)
    assert (windowing.ctx, windowing.stride, windowing.windows) == (512, 256, None)
    theirs = tokenizer(text, return_tensors="pt").input_ids[0]
    assert torch.equal(text_ids(text, tokenizer, windowing), theirs)
    assert len(theirs) % 256, "the last window is to be a shorter one"
    got = perplexity(scorer, windows_of(theirs, windowing))
    want = transformers_recipe(scorer.model, theirs, 512, 256)
    assert got.tokens == len(theirs) - 1, "each token but the first"
    assert math.log(got.perplexity) == pytest.approx(math.log(want), rel=1e-4)


def test_llama_cpp_512_is_the_loop_of_llama_perplexity(stories: Path, text: str) -> None:
    tokenizer, scorer = load_tokenizer(stories), load_scorer(stories)
    windowing = windowing_for("llama.cpp-512", [stories], tokenizer)
    assert windowing.bos == "each", "the model wants a BOS token"
    ids = text_ids(text, tokenizer, windowing)
    windows = windows_of(ids, windowing)
    got = perplexity(scorer, windows)
    assert got.tokens == 255 * len(windows) == divergence(scorer, scorer, windows).positions
    assert got.perplexity == pytest.approx(llama_perplexity_loop(scorer.model, ids), rel=1e-5)


def test_what_is_compared_and_what_is_scored_predict_the_same_tokens() -> None:
    window = Window(torch.arange(10), 4, predictive=True)
    compared = torch.arange(10)[window.compared].tolist()
    assert compared == [4, 5, 6, 7, 8] and window.positions == 5
    assert window.ids[window.first_scored :].tolist() == [i + 1 for i in compared]


@pytest.mark.parametrize("rest", range(8))
def test_the_tail_scores_every_token_once(rest: int) -> None:
    ids = torch.arange(100, 100 + 24 + rest)
    for stride in (8, 5, 1):
        windows = windows_of(ids, Windowing(8, stride, windows=None, tail=True))
        scored = [int(t) for w in windows for t in w.ids[w.first_scored :]]
        lost = {100 + 8 * i for i in range(4)} if stride == 8 else {100}
        if stride == 8 and rest == 1:
            lost.add(124)
        assert scored == [t for t in range(100, 124 + rest) if t not in lost], (stride, rest)
    short = windows_of(ids[:5], Windowing(8, 8, windows=None, tail=True))
    assert [len(w.ids) for w in short] == [5]


def test_a_tokenizer_that_ends_texts_is_refused(stories: Path) -> None:
    assert tokenizing(load_tokenizer(stories)) == Tokenizing((BOS,), BOS)

    class Ends:
        bos_token_id = None

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [5, 2] if add_special_tokens else [5]}

    with pytest.raises(UserError, match="behind a text"):
        tokenizing(Ends())


def test_unknown_names_and_short_models_are_refused() -> None:
    none = Tokenizing((), None)
    with pytest.raises(UserError, match="unknown protocol 'hf-2408'; did you mean 'hf-2048'"):
        named_windowing("hf-2408", None, none)
    with pytest.raises(UserError, match="hf-2048 needs 2048 positions, but a model takes 1024"):
        named_windowing("hf-2048", 1024, none)
    assert named_windowing("llama.cpp-512", None, none).bos == "none"
    assert named_windowing("hf-stride", 1024, none).stride == 512, "GPT-2's, as in the recipe"
    assert named_windowing("hf-stride", 131072, none).ctx == 1024


def test_the_command_takes_each_name_and_no_windows_beside_it(stories: Path, text: str,
                                                              tmp_path: Path) -> None:  # fmt: skip
    assert tuple(PROTOCOLS) == NAMED
    import typer

    app = typer.Typer()
    app.command()(evaluate)
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    options = [str(stories), "--text", str(file), "--protocol", "llama.cpp-512"]
    with pytest.raises(UserError, match="says what --skip would"):
        CliRunner().invoke(app, [*options, "--skip", "3"], catch_exceptions=False)
    result = CliRunner().invoke(app, [*options, "--windows", "2", "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["protocol"]["name"] == "llama.cpp-512"
    assert found["protocol"]["positions"] == found["protocol"]["scored_tokens"] == 2 * 255
    alone = load_text(str(file), "evaluation")
    windowing = windowing_for("llama.cpp-512", [stories], load_tokenizer(stories), 2)
    report = measure_models({"model": stories}, alone, windowing, protocol="llama.cpp-512")
    assert report.rows[0].perplexity.perplexity == found["rows"][0]["perplexity"]["perplexity"]
    assert "protocol llama.cpp-512; the next token alone" in report.to_markdown()
    assert len(tokenize(text, load_tokenizer(stories))) > 1024
