"""Models that the decoder does not know run by their own modules over blocks, with the tokens of
the other engine; those that keep anything but keys and values are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.loader import load
from lowbit.runtime.models import hf_module
from lowbit.runtime.models.choice import decline_model
from lowbit.runtime.models.hf_module import ModuleDecoder, decline_module
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    CohereConfig,
    FalconConfig,
    GlmConfig,
    StableLmConfig,
)

from .runtime_models import _GROUPED, _SIZES, FAMILIES, OTHERS, quantize_folder, save_tiny

_FALCON: dict[str, Any] = {k: v for k, v in _SIZES.items() if k != "intermediate_size"}
MODULES: dict[str, Callable[[], Any]] = {
    "opt": FAMILIES["opt"],
    "gpt_neox": FAMILIES["gpt_neox"],
    "falcon": lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_mqa": lambda: FalconConfig(**_FALCON, multi_query=True),
    "stablelm": lambda: StableLmConfig(**_GROUPED, use_qkv_bias=True, qk_layernorm=True),
    "glm": lambda: GlmConfig(**_GROUPED, head_dim=16),
    "cohere": lambda: CohereConfig(**_GROUPED, logit_scale=0.5),  # scales behind its head
}
SHARED = "All prompts begin with these words, which fill several blocks. "
PROMPTS = [SHARED + end for end in ("One.", "Another one, a bit longer than it.", "")]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=MODULES)
def folder(request, tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), MODULES[request.param]())


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_tokens_are_those_of_the_other_engine(folder: Path) -> None:
    want = tokens(LLM(folder, "cpu", "float32", engine="contiguous", max_num_seqs=1))
    for options in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 2}):
        llm = LLM(folder, "cpu", "float32", **options)
        assert llm.engine == "paged", llm.engine_declined
        assert tokens(llm) == want
        assert tokens(llm) == want, "with what the prefix cache has"


def test_the_module_is_left_as_it_was(folder: Path) -> None:
    ids = torch.tensor([[256, 84, 104, 101, 32], [5, 4, 3, 2, 1]])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, "cpu", "float32")
    tokens(llm)
    with torch.inference_mode():
        torch.testing.assert_close(llm.logits(ids), plain(ids).logits, rtol=1e-5, atol=1e-5)
    assert llm.model.config._attn_implementation == plain.config._attn_implementation


def test_quantized_checkpoints_too(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "opt", FAMILIES["opt"]())
    folder = quantize_folder(source, tmp_path / "out")
    want = tokens(LLM(folder, "cpu", "float32", engine="contiguous", max_num_seqs=1))
    llm = LLM(folder, "cpu", "float32", kv_cache_dtype="model")
    assert llm.engine == "paged" and tokens(llm) == want
    attention = llm.model.model.decoder.layers[0].self_attn
    assert type(attention.q_proj).__name__ == "LinearPart"


def hybrid() -> BambaConfig:
    """State-space layers, and one of attention."""
    return BambaConfig(
        **_GROUPED, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1,
        mamba_d_state=16, mamba_chunk_size=16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hybrid, "keeps state beside keys and values: a recurrence's or a convolution's"),
        (OTHERS["lfm2"], "keeps state beside keys and values"),
        (OTHERS["bloom"], r"has positions in its mask \(ALiBi\)"),
        (lambda: FalconConfig(**_FALCON, alibi=True), r"has positions in its mask \(ALiBi\)"),
    ],
)
def test_others_are_refused_with_the_reason(config, reason: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "it", config())
    model = load(folder, "cpu", "float32").model
    declined = decline_model(model) or ""
    assert f"not {model.config.model_type}, and the model's own module" in declined
    with pytest.raises(UserError, match=f"the paged engine runs .*{reason}"):
        LLM(folder, "cpu", "float32", engine="paged")
    llm = LLM(folder, "cpu", "float32")
    assert llm.engine == "contiguous" and llm.engine_declined == declined


def test_a_module_that_gives_other_logits_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Such as one whose attention does more than what it asks of the interface."""
    model = load(save_tiny(tmp_path / "opt", FAMILIES["opt"]()), "cpu", "float32").model
    assert decline_module(model) is None
    answer = hf_module._Calls.answer

    def changed(self: Any, q: Any, k: Any, v: Any, options: Any) -> torch.Tensor:
        return answer(self, q * 1.5, k, v, options)

    monkeypatch.setattr(hf_module._Calls, "answer", changed)
    assert "gives other logits over blocks than by itself" in (decline_module(model) or "")


def test_layers_that_call_attention_twice_are_refused(tmp_path: Path) -> None:
    model = load(save_tiny(tmp_path / "opt", FAMILIES["opt"]()), "cpu", "float32").model
    layers = model.model.decoder.layers
    layers.append(layers[0])
    with pytest.raises(UserError, match=r"2 layers called attention as \[0, 1, 0\], not once each"):
        ModuleDecoder(model)
