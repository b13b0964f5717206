"""A request whose logits are not finite fails with its id; those beside it and after it do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, BeamSearchParams, RequestFailed, SamplingParams
from lowbit.runtime.paged_engine import PagedEngine
from safetensors.torch import load_file, save_file

from .runtime_models import FAMILIES, byte_tokenizer, save_tiny

(BROKEN,) = byte_tokenizer()("!")["input_ids"]  # whose embedding is not finite
GOOD = ["The first of those that go on", "Another one", "y"]
BAD = "One that fails in the middle! And goes on after that for some blocks of tokens more."


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=["nan", "inf"])
def folder(request, tmp_path_factory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["qwen2"]())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[BROKEN] = request.param
    save_file({**tensors, "model.embed_tokens.weight": embedding}, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("engine", ["paged", "contiguous"])
@pytest.mark.parametrize("n", [1, 2])
def test_one_fails_and_the_others_go_on(folder, engine, n):
    llm = LLM(folder, "cpu", "float32", engine=engine)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, n=n,
                            logit_bias={BROKEN: -100})  # fmt: skip
    expected = [o.outputs for o in llm.generate(GOOD, params, use_tqdm=False)]
    with pytest.raises(RequestFailed, match=r"request \d+: .*not finite in") as failure:
        llm.generate([GOOD[0], BAD, *GOOD[1:]], params, use_tqdm=False)
    outs = failure.value.outputs
    assert [o.outputs for o in (outs[0], *outs[2:])] == expected
    bad = outs[1]
    assert all(o.finish_reason == "error" and not o.token_ids for o in bad.outputs)
    assert bad.error == str(failure.value) and bad.request_id in bad.error
    assert len(bad.outputs) == n
    again = llm.generate(GOOD, params, use_tqdm=False)
    assert [o.outputs for o in again] == expected, "nothing of it is left behind"


def test_its_blocks_are_wiped_and_not_found_by_others(folder):
    """In a pool so small that its blocks are used again at once; its good beginning is common."""
    roomy = LLM(folder, "cpu", "float32")
    assert isinstance(roomy._engine, PagedEngine)
    block = sum(p.nbytes // len(p.codes) for pair in roomy._engine._kv.pools for p in pair)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True,
                            logit_bias={BROKEN: -100})  # fmt: skip
    prompts = [BAD[:28], GOOD[0], BAD[:20]]
    expected = [o.outputs for o in roomy.generate(prompts, params, use_tqdm=False)]
    llm = LLM(folder, "cpu", "float32", kv_memory=12 * block)
    for _ in range(2):
        with pytest.raises(RequestFailed):
            llm.generate([BAD, BAD], params, use_tqdm=False)
        pools = llm._engine._kv.pools  # type: ignore[union-attr]
        assert all(torch.isfinite(p.codes).all() for pair in pools for p in pair)
        assert [o.outputs for o in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert llm.metrics().kv_usage == 0


def test_a_long_prompt_fails_in_the_chunk_that_is_broken(folder):
    llm = LLM(folder, "cpu", "float32", max_num_seqs=1, max_num_batched_tokens=8)
    with pytest.raises(RequestFailed, match="not finite"):
        llm.generate(BAD, use_tqdm=False)
    assert llm.stats.prefill_tokens == 32, "the token is the 29th"
    pools = llm._engine._kv.pools  # type: ignore[union-attr]
    assert all(torch.isfinite(p.codes).all() for pair in pools for p in pair)


def test_beams_and_streams_fail_too(folder):
    llm = LLM(folder, "cpu", "float32")
    with pytest.raises(UserError, match="request beams-.*not finite"):
        llm.beam_search(["x", BAD], BeamSearchParams(2, 5))
    with pytest.raises(RequestFailed, match="not finite"):
        list(llm.stream(BAD))
    assert llm.metrics().kv_usage == 0 and llm.metrics().running == 0
