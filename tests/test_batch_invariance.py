"""Rows that have the same bits in every batch: linears, attention, and whole engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels import plain_linear, row_tiles
from lowbit.kernels.attention_ops import (
    AttentionOutput,
    paged_attention,
    paged_attention_reference,
)
from lowbit.kernels.compiled import decline_compiled
from lowbit.kernels.errors import UserError
from lowbit.kernels.linear_ops import LinearOperands, LinearProblem, linear_kernels
from lowbit.kernels.plain_linear import PlainProblem, choose_plain
from lowbit.kernels.row_tiles import CPU_ROWS, in_row_tiles
from lowbit.quantize.planning import runtimes
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.models import choice
from torch import Tensor

from . import moe_models
from .attention_cases import Sequences, batch_of, options, stored_forms
from .runtime_models import FAMILIES, quantize_folder, save_tiny
from .test_speculation import always, engine

PROMPTS = [
    "the cat and the dog and the cat and the bird",
    "a",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen",
    "the cat and the dog",
    "0 1 2 3 4 5 6 7 8 9",
]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("rows", [0, 1, CPU_ROWS - 1, CPU_ROWS, CPU_ROWS + 1, 3 * CPU_ROWS])
def test_products_have_one_shape(rows: int) -> None:
    weight, seen = torch.randn(24, 40), []

    def product(tile: Tensor) -> Tensor:
        seen.append(len(tile))
        return tile @ weight.T

    x = torch.randn(1, rows, 40)
    y = in_row_tiles(product, x)
    assert y.shape == (1, rows, 24)
    torch.testing.assert_close(y, x @ weight.T)
    assert set(seen) <= ({CPU_ROWS} if rows else {0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [96, 100])
def test_a_row_of_a_plain_linear_is_the_same_in_any_batch(columns: int, dtype: torch.dtype) -> None:
    """Of widths that every kernel takes, and that only some do."""
    weight, bias = torch.randn(200, columns).to(dtype), torch.randn(200).to(dtype)
    problem = PlainProblem(dtype, "cpu", batch_invariant=True, in_features=columns)
    kernel = choose_plain(problem).candidate
    check_rows(
        lambda x: kernel.run(x, kernel.pack(weight), bias), torch.randn(41, columns).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_row_of_a_packed_linear_is_the_same_in_any_batch(bits: int, dtype: torch.dtype) -> None:
    """By every kernel that takes the problem here."""
    group = 128 if bits == 8 else 32
    problem = LinearProblem(
        bits, group, True, 128, 64, dtype, "cpu", batch_invariant=True, taped=True
    )
    limit = 1 << (bits - 1)
    codes = torch.randint(-limit, limit, (64, 128), dtype=torch.int8)
    operands = LinearOperands(codes, torch.rand(64, 128 // group) * 0.1 + 0.01)
    ran = []
    for kernel in linear_kernels():
        if kernel.decline(problem) is None:
            packed = kernel.pack(operands, problem)
            run = lambda x, k=kernel, p=packed: k.run(x, p, None, problem)  # noqa: E731
            check_rows(run, torch.randn(141, 128).to(dtype))
            ran.append(kernel.name)
    assert "dequant" in ran and (bits, dtype) != (4, torch.bfloat16) or "int4pack_cpu" in ran
    assert ("int16_cpu" in ran) == (decline_compiled() is None)


def check_rows(run: Any, x: Tensor) -> None:
    """The rows of run(x) are those of its parts, bit for bit."""
    whole = run(x)
    for rows in (slice(0, 1), slice(5, 22), slice(40, 41), slice(1, len(x))):
        assert torch.equal(run(x[rows]), whole[rows]), rows


def attended(s: Sequences, o: Any, queries: Tensor, batch: Any) -> AttentionOutput:
    return paged_attention(queries, s.keys, s.values, batch, o, "chunks")


def invariant(lengths: Sequence[int], queries: Sequence[int], tables: Tensor) -> Any:
    plain = batch_of(list(lengths), list(queries), tables, "cpu")
    return replace(plain, batch_invariant=True)


@pytest.mark.parametrize("flags", ["plain", "window", "sinks", "alibi", "softcap", "window-sinks"])
@pytest.mark.parametrize("form", ["dense", "int8", "int4_rotated"])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [([140, 7, 0, 300], [1, 7, 1, 30]), ([280], [270]), ([], [])],
    ids=str,
)  # fmt: skip
def test_attention_in_chunks_is_the_definition(
    lengths: list[int], queries: list[int], form: str, flags: str
) -> None:
    """Whatever lies in blocks and slots that are nobody's."""
    fmt = stored_forms(32)[form]
    s = Sequences(lengths, queries, forms=(fmt, fmt), dtype=torch.float32)
    o = options(6, 32, *flags.split("-"))
    got = attended(s, o, s.q, invariant(lengths, queries, s.tables))
    expected = paged_attention_reference(s.q.double(), s.keys, s.values, s.batch, o)
    torch.testing.assert_close(got.out.double(), expected.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, atol=8e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", ["plain", "window"])
def test_a_token_attends_alike_however_its_step_is_made(flags: str, dtype: torch.dtype) -> None:
    lengths, queries = [300, 40, 261], [150, 40, 1]
    s = Sequences(lengths, queries, dtype=dtype, poison=False)
    o = options(6, 32, flags)
    whole = attended(s, o, s.q, invariant(lengths, queries, s.tables))
    done = 0
    for n in (1, 5, 100, 44):  # the first sequence's new tokens, in steps of its own
        length = lengths[0] - queries[0] + done + n
        batch = invariant([length], [n], s.tables[:1])
        part = attended(s, o, s.q[done : done + n], batch)
        assert torch.equal(part.out, whole.out[done : done + n])
        assert torch.equal(part.lse, whole.lse[done : done + n])
        done += n
    assert done == queries[0]


def told(llm: LLM, prompts: Sequence[str]) -> list[Any]:
    """Tokens of each prompt with the logprobs of the likeliest, as they are."""
    outputs = [c for o in llm.generate(list(prompts), GREEDY, use_tqdm=False) for c in o.outputs]
    return [
        (c.token_ids, [{t: x.logprob for t, x in step.items()} for step in c.logprobs or ()])
        for c in outputs
    ]


MODELS = {
    "llama": lambda f: save_tiny(f, FAMILIES["llama"]()),
    "gemma3": lambda f: save_tiny(f, FAMILIES["gemma3"]()),
    "gpt_neox": lambda f: save_tiny(f, FAMILIES["gpt_neox"]()),
    "mixtral": lambda f: save_tiny(f, moe_models.FAMILIES["mixtral"]()),
    "w4": lambda f: quantize_folder(
        save_tiny(f.with_name("plain"), FAMILIES["qwen2"]()), f, "W4A16", 32
    ),
}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("gemma3", {"dtype": "float32"}),
        ("gpt_neox", {"dtype": "float32"}),
        ("mixtral", {"dtype": "float32"}),
        ("w4", {"dtype": "bfloat16"}),
        ("w4", {"dtype": "float32", "kv_cache_dtype": "int4_hadamard"}),
    ],
    ids=lambda v: "-".join(v.values()) if isinstance(v, dict) else v,
)
def test_logits_are_the_same_bits_however_requests_are_batched(
    model: str, options: dict[str, str], tmp_path: Path
) -> None:
    folder = MODELS[model](tmp_path / "model")
    fixed: dict[str, Any] = {"device": "cpu", "batch_invariant": True, **options}
    llm = LLM(folder, **fixed)
    alone = [told(llm, [prompt])[0] for prompt in PROMPTS]
    assert told(llm, PROMPTS) == alone, "side by side"
    cut = LLM(folder, **fixed, max_num_batched_tokens=7, enable_prefix_caching=False)
    assert told(cut, PROMPTS) == alone, "prompts in pieces"
    for method in ("ngram", "lookahead"):
        assert told(always(LLM(folder, **fixed, speculate=method)), PROMPTS) == alone, method


def test_a_model_whose_rows_differ_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A product that is left as it is: a row alone goes through another one than many do."""
    folder = save_tiny(tmp_path / "model", FAMILIES["llama"]())
    for module in (plain_linear, runtimes, choice):
        monkeypatch.setattr(module, "prefers_compiled", lambda: False)
    choose_plain.cache_clear()
    request.addfinalizer(choose_plain.cache_clear)
    for module in (plain_linear, row_tiles):
        monkeypatch.setattr(module, "in_row_tiles", lambda product, x: product(x) * (1 + len(x)))
    with pytest.raises(UserError, match="logits depend on what runs beside a request"):
        LLM(folder, "cpu", "float32", batch_invariant=True)


def test_who_cannot_be_invariant_is_told_why(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", FAMILIES["llama"]())
    with pytest.raises(UserError, match="kv_eviction does not go with batch_invariant"):
        LLM(folder, "cpu", batch_invariant=True, kv_eviction="window", kv_budget=64)
    with pytest.raises(UserError, match="batch_invariant needs the paged engine"):
        LLM(folder, "cpu", batch_invariant=True, engine="contiguous")
    assert engine(LLM(folder, "cpu", batch_invariant=True)).loaded.batch_invariant
