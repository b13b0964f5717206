"""The engine against transformers: same logits, same tokens, batched as one by one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lowbit.kernels.compiled import prefers_compiled
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.models.families import takes_tape
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from .runtime_models import (
    EOS,
    FAMILIES,
    OTHERS,
    VOCAB,
    byte_tokenizer,
    fake_quantized,
    hf_greedy,
    quantize_folder,
    save_tiny,
)

GREEDY = SamplingParams(max_tokens=64, temperature=0)
PROMPTS = ["The cat", "x", "A much longer prompt than the others, of fifty bytes.", "two words"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """family -> folder of a tiny random model, made when first asked for."""
    made: dict[str, Path] = {}

    def original(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(tmp_path_factory.mktemp(family), FAMILIES[family]())
        return made[family]

    return original


@pytest.fixture(scope="module")
def quantized(originals, tmp_path_factory):
    """(family, scheme) -> folder of its quantized checkpoint, made when first asked for."""
    made: dict[tuple[str, str], Path] = {}

    def checkpoint(family: str, scheme: str = "W4A16") -> Path:
        if (family, scheme) not in made:
            out = tmp_path_factory.mktemp(family) / scheme
            made[family, scheme] = quantize_folder(originals(family), out, scheme)
        return made[family, scheme]

    return checkpoint


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(seed))


def hf_compressed(folder: Path, asymmetric: bool = False):
    """transformers' float32 model of a compressed-tensors checkpoint.

    An asymmetric one is dequantized at load: the default, to dequantize at the first call, fails on
    packed zero-points (compressed-tensors 0.20.1 expects them unpacked).
    """
    extra = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra).eval()


def tolerance(llm: LLM, logits: torch.Tensor, exact: float) -> float:
    """How far logits may be from `logits`: `exact` where products are of float32, else what inputs
    as whole numbers of 16 bits lose, of which attention that sees one key makes some tens."""
    int16 = any(r.kernel == "int16_cpu" for r in llm.linear_report())
    return 1e-3 * float(logits.abs().max()) if int16 else exact


def token_ids(llm: LLM, prompts, params) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_original_folder_equals_transformers(family, originals):
    hf = AutoModelForCausalLM.from_pretrained(originals(family), dtype=torch.float32).eval()
    llm = LLM(originals(family), dtype="float32")
    with torch.inference_mode():
        assert torch.equal(llm.logits(rows()), hf(rows()).logits)
    prompt = byte_tokenizer()(PROMPTS[0])["input_ids"]
    assert token_ids(llm, [prompt], GREEDY) == [hf_greedy(hf, prompt, 64)]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_fake_quantized(family, originals, quantized):
    hf = fake_quantized(originals(family), quantized(family))
    llm = LLM(quantized(family), dtype="float32")
    taped = takes_tape(llm.model.config)
    assert {r.kernel for r in llm.linear_report()} == {"int16_cpu" if taped else "dequant"}
    with torch.inference_mode():
        want = hf(rows()).logits
        assert (llm.logits(rows()) - want).abs().max() < tolerance(llm, want, 1e-5)
    prompt = byte_tokenizer()(PROMPTS[0])["input_ids"]
    assert token_ids(llm, [prompt], GREEDY) == [hf_greedy(hf, prompt, 64)]


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W3A16", "W2A16_ASYM", "W8A16"])
def test_greedy_equals_transformers_on_the_same_checkpoint(scheme, quantized):
    pytest.importorskip("compressed_tensors", reason="transformers needs it to read the layout")
    folder = quantized("llama", scheme)
    hf = hf_compressed(folder, asymmetric="ASYM" in scheme)
    llm = LLM(folder, dtype="float32")
    with torch.inference_mode():
        want = hf(rows()).logits
        assert (llm.logits(rows()) - want).abs().max() < tolerance(llm, want, 1e-3)
    prompt = byte_tokenizer()(PROMPTS[0])["input_ids"]
    assert token_ids(llm, [prompt], GREEDY) == [hf_greedy(hf, prompt, 64)]


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_int4_kernel_is_close_to_fake_quantized_in_bf16(scheme, originals, quantized):
    hf = fake_quantized(originals("llama"), quantized("llama", scheme))
    llm = LLM(quantized("llama", scheme), device="cpu")
    assert llm.dtype == torch.bfloat16
    packed = "int16_cpu" if prefers_compiled() else "int4pack_cpu"
    assert {r.kernel for r in llm.linear_report()} == {packed}
    with torch.inference_mode():
        exact = hf(rows()).logits
        in_bf16 = hf.to(torch.bfloat16)(rows()).logits.float()
        error = (llm.logits(rows()).float() - exact).square().mean()
        # no worse than the same weights rounded to bf16, up to the rounding of the scales
        assert error < 2 * (in_bf16 - exact).square().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_equals_one_by_one(family, quantized):
    """Greedy and sampled rows, of different lengths, that finish at different times."""
    params = [
        SamplingParams(max_tokens=20, temperature=0),
        SamplingParams(max_tokens=30, temperature=0.8, seed=1),
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=40, temperature=1.0, top_k=5, top_p=0.9, seed=2),
    ]
    alone = LLM(quantized(family), dtype="float32", max_num_seqs=1)
    expected = token_ids(alone, PROMPTS, params)
    assert expected == [token_ids(alone, [p], s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert len({tuple(e) for e in expected}) == len(PROMPTS)
    for max_num_seqs in (2, 3, 16):
        batched = LLM(quantized(family), dtype="float32", max_num_seqs=max_num_seqs)
        assert token_ids(batched, PROMPTS, params) == expected


@pytest.mark.parametrize("family", OTHERS)
def test_models_with_other_state_equal_transformers(family, tmp_path):
    """Prompts of different length at once, whether they share a batch or run one at a time."""
    folder = save_tiny(tmp_path / family, OTHERS[family]())
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, dtype="float32")
    for out in llm.generate(PROMPTS, GREEDY):
        assert out.outputs[0].token_ids == hf_greedy(hf, out.prompt_token_ids, 64)


def test_seed_decides_and_no_seed_is_random(originals):
    llm = LLM(originals("llama"))
    params = SamplingParams(max_tokens=30, temperature=2.0, seed=5)
    first = token_ids(llm, "hello", params)
    assert token_ids(llm, "hello", params) == first
    free = SamplingParams(max_tokens=30, temperature=2.0)
    assert token_ids(llm, "hello", free) != token_ids(llm, "hello", free)


def test_tied_embeddings_share_memory_and_packed_weights_are_small(quantized):
    llm = LLM(quantized("llama"), dtype="float32")
    assert llm.model.lm_head.weight is llm.model.model.embed_tokens.weight
    reports = llm.linear_report()
    assert len(reports) == 2 * 7
    for r in reports:
        weights = r.problem.in_features * r.problem.out_features
        assert r.nbytes == weights / 2 + 4 * weights / 32  # 4-bit codes, float32 scales
    inside = {name.rpartition(".")[2] for name, _ in llm.model.named_parameters()}
    assert inside == {"weight"}
    packed = sum(p.numel() for n, p in llm.model.named_parameters() if "proj" in n)
    assert packed == 0


def test_mixed_schemes_take_their_own_kernels(originals, tmp_path):
    out = quantize_folder(
        originals("llama"), tmp_path / "mixed", mixed={"down_proj": "W8A16", "q_proj": "W3A16"}
    )
    llm = LLM(out, device="cpu")
    kernels = {r.module.rpartition(".")[2]: r.kernel for r in llm.linear_report()}
    assert [kernels[name] for name in ("down_proj", "q_proj", "o_proj")] == (
        ["int16_cpu"] * 3 if prefers_compiled() else ["int8pack_cpu", "dequant", "int4pack_cpu"]
    )
    hf = fake_quantized(originals("llama"), out)
    with torch.inference_mode():
        in_float32, want = LLM(out, dtype="float32"), hf(rows()).logits
        exact = in_float32.logits(rows())
        assert (exact - want).abs().max() < tolerance(in_float32, want, 1e-5)


def test_end_of_sequence_stops_unless_ignored(originals):
    llm = LLM(originals("llama"), dtype="float32")
    assert llm._maker._eos_token_ids == {EOS}
    free = token_ids(llm, "The cat", SamplingParams(max_tokens=200, temperature=1, seed=3))[0]
    assert free[-1] == EOS and EOS not in free[:-1]  # seed 3 ends by itself
    out = llm.generate("The cat", SamplingParams(200, temperature=1, seed=3))[0].outputs[0]
    assert out.finish_reason == "stop" and "</s>" not in out.text
    ignored = SamplingParams(max_tokens=200, temperature=1, seed=3, ignore_eos=True)
    out = llm.generate("The cat", ignored)[0].outputs[0]
    assert out.finish_reason == "length" and len(out.token_ids) == 200
    assert out.token_ids[: len(free)] == free


def test_stop_string_ends_the_text(originals):
    llm = LLM(originals("llama"), dtype="float32")
    whole = llm.generate("The cat", GREEDY)[0].outputs[0].text
    stop = whole[10:12]
    out = llm.generate("The cat", SamplingParams(64, temperature=0, stop=[stop]))[0].outputs[0]
    assert out.text == whole[: whole.find(stop)] and out.finish_reason == "stop"
    assert len(out.token_ids) < 64


def test_stream_adds_up_to_generate(originals):
    llm = LLM(originals("llama"), dtype="float32")
    *pieces, result = llm.stream("The cat", GREEDY)
    assert result.outputs == llm.generate("The cat", GREEDY)[0].outputs
    assert "".join(pieces) == result.outputs[0].text and len(pieces) > 1


def test_chat_uses_the_template(originals):
    llm = LLM(originals("llama"), dtype="float32")
    message = [{"role": "user", "content": "hi"}]
    out = llm.chat(message, GREEDY)[0]
    assert out.prompt == "[user]hi[assistant]"
    assert out.outputs == llm.generate("[user]hi[assistant]", GREEDY)[0].outputs
    assert [o.outputs for o in llm.chat([message, message], GREEDY)] == [out.outputs] * 2


def test_prompt_forms_are_the_same(originals):
    llm = LLM(originals("llama"), dtype="float32")
    ids = byte_tokenizer()("The cat")["input_ids"]
    expected = llm.generate("The cat", GREEDY)[0]
    assert expected.prompt == "The cat" and expected.prompt_token_ids == ids
    for form in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        out = llm.generate(form, GREEDY)
        assert len(out) == 1 and out[0].outputs == expected.outputs and out[0].prompt is None


def test_output_is_cut_to_the_context_and_metrics_count(originals):
    llm = LLM(originals("llama"), max_model_len=20)
    out = llm.generate([list(range(5))], SamplingParams(100, temperature=0, ignore_eos=True))[0]
    assert len(out.outputs[0].token_ids) == 15 and out.outputs[0].finish_reason == "length"
    assert (out.metrics.prefill_tokens, out.metrics.decode_tokens) == (5, 14)
    assert out.metrics.prefill_seconds > 0 and out.metrics.decode_seconds > 0
    assert (llm.stats.prefill_tokens, llm.stats.decode_tokens) == (5, 14)
    assert llm.stats.decode_seconds == pytest.approx(out.metrics.decode_seconds)


def test_trained_model_equals_transformers(tmp_path):
    data = os.environ.get("LOWBIT_TEST_DATA")
    if not data:
        pytest.skip("LOWBIT_TEST_DATA does not name the folder with the tiny trained model")
    pytest.importorskip("compressed_tensors", reason="transformers needs it to read the layout")
    mixed = {"down_proj": "W8A16"}  # its 172 columns have no groups of 32
    folder = quantize_folder(Path(data) / "stories260k", tmp_path / "w4", "W4A16", mixed=mixed)
    hf = hf_compressed(folder)
    llm = LLM(folder, dtype="float32")
    prompts = ["Once upon a time", "Tom and Lily went to the park. They saw", "The"]
    for out in llm.generate(prompts, GREEDY):
        assert out.outputs[0].token_ids == hf_greedy(hf, out.prompt_token_ids, 64)
    assert "little girl" in llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
