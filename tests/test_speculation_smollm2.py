"""SmolLM2 with and without guesses: 20 prompts, 128 greedy tokens each, the same ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf.demo_model import fetch_smollm2
from lowbit.runtime import LLM, SamplingParams

from .test_speculation import always

PROMPTS = [
    "The first ten prime numbers are",
    "Once upon a time, there was a little girl",
    "In 1492, Christopher Columbus",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,",
    "def fibonacci(n):",
    "Water boils at",
    "The capital of France is Paris. The capital of Italy is",
    "Dear Sir or Madam,",
    "Q: What is a llama?\nA:",
    "import numpy as np\n\ndef mean(x):",
    "To make bread, you need",
    "The mitochondria is",
    "Roses are red, violets are blue,",
    "a b c d e f g a b c d e f g a b c",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "In the beginning",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "Yesterday I went to the market and bought",
]
GREEDY = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fetch_smollm2(tmp_path_factory.mktemp("cache"))[0]
    except UserError as e:
        pytest.skip(f"the demo's model cannot be fetched here: {e}")


def tokens_of(folder: Path, method: str | None, note: Callable[[str, object], None]) -> list[Any]:
    llm = LLM(
        folder, "cpu", "float32", max_num_seqs=20, max_model_len=256, batch_invariant=True,
        speculate=method,
    )  # fmt: skip
    if method is not None:
        always(llm)
    started = time.perf_counter()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    told = llm.metrics().speculation
    note("seconds", time.perf_counter() - started)
    note("guesses", str(told))
    assert told is None or told.accepted > 0
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def plain(smollm2: Path, record_testsuite_property: Callable[[str, object], None]) -> list[Any]:
    return tokens_of(smollm2, None, record_testsuite_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["ngram", "lookahead", "itself"])
def test_guesses_change_no_token(
    method: str, smollm2: Path, plain: list[Any], record_property: Callable[[str, object], None]
) -> None:
    assert len(plain) == 20 and all(len(tokens) == 128 for tokens in plain)
    named = str(smollm2) if method == "itself" else method
    assert tokens_of(smollm2, named, record_property) == plain
