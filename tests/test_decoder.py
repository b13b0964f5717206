"""The decoder over paged keys and values equals transformers' models, whole, in chunks and beside
others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.kernels.paged_kv import new_pool
from lowbit.quantize.planning.runtimes import TAPED
from lowbit.runtime.fused import LinearPart
from lowbit.runtime.loader import load
from lowbit.runtime.models.decoder import Decoder, KVPools
from lowbit.runtime.step_inputs import step_inputs
from torch import Tensor
from transformers import (
    Gemma2Config,
    GraniteConfig,
    MixtralConfig,
    Olmo2Config,
    Qwen3MoeConfig,
)

from .runtime_models import _GROUPED, _WINDOW, FAMILIES, VOCAB, save_tiny, with_config

BLOCK, BLOCKS, LENGTH = 16, 24, 40
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
DECODED: dict[str, Callable[[], Any]] = {
    **{name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")},
    "gemma2": lambda: Gemma2Config(**_GROUPED, head_dim=16, query_pre_attn_scalar=16, **_WINDOW),
    "olmo2": lambda: Olmo2Config(**_GROUPED),
    "granite": lambda: GraniteConfig(
        **_GROUPED, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "mixtral": lambda: MixtralConfig(**_GROUPED, num_local_experts=4, **_EXPERTS),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_GROUPED, head_dim=16, num_experts=4, moe_intermediate_size=32, **_EXPERTS
    ),
}  # fmt: skip


class Run:
    """A decoder with pools of its own; sequence number i owns the blocks i, i + 4, i + 8, ..."""

    def __init__(
        self, model: Any, dtype: torch.dtype = torch.float32, compiled: bool = True
    ) -> None:
        self.decoder = Decoder(model, max_len=256, compiled=compiled)
        self.pools = [
            KVPools(*(new_pool(BLOCKS, x.kv_heads, BLOCK, x.head_dim, None, dtype) for _ in "kv"))
            for x in self.decoder.layers
        ]

    @torch.inference_mode()
    def __call__(
        self, chunks: Sequence[tuple[int, Sequence[int], int]], rows: Tensor | None = None
    ) -> Tensor:
        """Logits of all tokens (or `rows`) of (sequence, token ids, tokens before them)."""
        tables = [list(range(seq, BLOCKS, 4)) for seq, _, _ in chunks]
        tokens, positions, slots = [], [], []
        for (_, ids, start), table in zip(chunks, tables, strict=True):
            tokens += ids
            positions += range(start, start + len(ids))
            slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in positions[-len(ids) :]]
        kinds = len(self.decoder.windows)
        step = step_inputs(
            tokens, positions, [slots] * kinds, [len(ids) for _, ids, _ in chunks],
            [start + len(ids) for _, ids, start in chunks], [tables] * kinds, torch.device("cpu"),
        )  # fmt: skip
        hidden = self.decoder(step.token_ids, self.pools, step.batches, step.new, rows)
        return self.decoder.logits(hidden)


def sequence(seed: int, length: int = LENGTH) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 16, (length,), generator=draw).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(tmp_path_factory.mktemp(family), DECODED[family]())
        return made[family]

    return folder


def loaded(folder: Path, roughen: bool = True) -> Any:
    """The folder's model; its norms' and biases' weights, all alike in a new model, made unlike."""
    model = load(folder, "cpu", "float32").model
    noise = torch.Generator().manual_seed(1)
    for parameter in model.parameters() if roughen else ():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=noise)
    return model


@pytest.mark.parametrize("family", DECODED)
def test_logits_equal_transformers(family: str, folders) -> None:
    model = loaded(folders(family))
    tokens = [sequence(0), sequence(1, 27)]
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([t])).logits[0] for t in tokens]
    run = Run(model)
    at_once = run([(0, tokens[0], 0), (1, tokens[1], 0)])
    scale = float(expected[0].std())
    for got, want in zip(at_once.split([LENGTH, 27]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * scale)
    in_chunks = [run([(2, tokens[0][:9], 0)]), run([(2, tokens[0][9:33], 9), (3, tokens[1], 0)])]
    rest = [run([(2, [t], at)]) for at, t in enumerate(tokens[0]) if at >= 33]
    got = torch.cat([in_chunks[0], in_chunks[1][:24], *rest])
    torch.testing.assert_close(got, expected[0], rtol=1e-4, atol=1e-4 * scale)


def test_only_the_rows_asked_for_are_computed_to_the_end(folders) -> None:
    run = Run(loaded(folders("llama")))
    whole, last = run([(0, sequence(0), 0)]), run([(0, sequence(0), 0)], torch.tensor([LENGTH - 1]))
    torch.testing.assert_close(last, whole[-1:])


def test_dense_linears_are_fused_without_a_second_copy(folders) -> None:
    model = loaded(folders("qwen2"))
    decoder = Decoder(model, max_len=64)
    attention = model.model.layers[0].self_attn
    whole = decoder.layers[0].qkv.linears[0]
    assert whole.packed.shape[0] == 64 + 2 * 32
    if whole.kernel.repacks:  # the module's linears are parts of the product
        assert isinstance(attention.q_proj, LinearPart)
        return
    assert attention.q_proj.weight.data_ptr() == whole.packed.data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == whole.packed.data_ptr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "opt"}, "the decoder runs .*llama.*, not opt"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "the decoder has no rotary embedding of type dynamic",
        ),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(changes, message, tmp_path) -> None:
    family = "opt" if "model_type" in changes else "llama"
    folder = save_tiny(tmp_path / "it", FAMILIES[family](), tokenizer=False)
    model = load(with_config(folder, **changes), "cpu", "float32").model
    with pytest.raises(UserError, match=message):
        Decoder(model, max_len=64)


def test_families_that_plans_take_for_taped_are_those_without_experts() -> None:
    assert set(DECODED) - {"mixtral", "qwen3_moe"} == {
        "gemma3" if name == "gemma3_text" else name for name in TAPED
    }
