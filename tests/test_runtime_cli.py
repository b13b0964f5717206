"""`quantize generate`: what goes to standard output and what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from lowbit.kernels.compiled import prefers_compiled
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.generate import generate, guesser_of
from lowbit.runtime import LLM, SamplingParams
from typer.testing import CliRunner

from .runtime_models import FAMILIES, quantize_folder, save_tiny

PARAMS = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    original = save_tiny(folder / "original", FAMILIES["llama"]())
    return quantize_folder(original, folder / "w4")


def run(*arguments: str):
    app = typer.Typer()
    app.command()(generate)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.exception
    return result


def test_text_of_the_chat_template_and_without(checkpoint):
    llm = LLM(checkpoint)
    answer = llm.chat([{"role": "user", "content": "hi"}], PARAMS)[0].outputs[0].text
    plain = llm.generate("hi", PARAMS)[0].outputs[0].text
    assert answer != plain
    options = (str(checkpoint), "hi", "--max-tokens", "12")
    assert run(*options).stdout == answer + "\n"
    assert run(*options, "--chat").stdout == answer + "\n"
    assert run(*options, "--no-chat").stdout == plain + "\n"


def test_json_is_one_object_and_nothing_else(checkpoint):
    result = run(str(checkpoint), "hi", "--json", "--verbose", "--max-tokens", "12", "--no-chat")
    told = json.loads(result.stdout)
    expected = LLM(checkpoint).generate("hi", PARAMS)[0]
    assert told["text"] == expected.outputs[0].text
    assert told["token_ids"] == expected.outputs[0].token_ids
    assert told["prompt_token_ids"] == expected.prompt_token_ids
    assert told["finish_reason"] == expected.outputs[0].finish_reason
    assert told["metrics"]["decode_tokens"] == len(told["token_ids"]) - 1


def test_verbose_names_kernels_and_reasons(checkpoint):
    in_bf16 = run(str(checkpoint), "hi", "--verbose", "--device", "cpu").stderr
    compiled = prefers_compiled()
    assert (": int16_cpu" if compiled else ": int4pack_cpu") in in_bf16 and "decode:" in in_bf16
    exact = run(str(checkpoint), "hi", "--verbose", "--device", "cpu", "--dtype", "float32").stderr
    if compiled:
        assert ": int16_cpu" in exact
    else:
        assert "dequant (" in exact and "int4pack_cpu computes in bfloat16, not float32" in exact


def test_sampling_options_arrive(checkpoint):
    options = (
        "--temperature", "1.5", "--top-p", "0.9", "--top-k", "30", "--seed", "4",
        "--max-tokens", "20", "--ignore-eos", "--stop", "qq", "--stop", "zz", "--no-chat",
    )  # fmt: skip
    params = SamplingParams(20, 1.5, 0.9, 30, ["qq", "zz"], 4, True)
    expected = LLM(checkpoint).generate("hi", params)[0].outputs[0]
    told = json.loads(run(str(checkpoint), "hi", *options, "--json").stdout)
    assert told["token_ids"] == expected.token_ids and told["text"] == expected.text


def test_the_format_of_the_cache_arrives_and_is_named(checkpoint):
    options = (
        str(checkpoint),
        "hi",
        "--max-tokens",
        "40",
        "--ignore-eos",
        "--no-chat",
        "--verbose",
    )
    params = SamplingParams(40, 0.0, ignore_eos=True)
    expected = LLM(checkpoint, kv_cache_dtype="k2v2").generate("hi", params)[0].outputs[0].text
    rounded, plain = run(*options, "--kv", "k2v2"), run(*options)
    assert rounded.stdout == expected + "\n" != plain.stdout
    assert "KV cache: K int2" in rounded.stderr and "KV cache: as computed" in plain.stderr


def test_guesses_change_no_text_and_are_told_of(checkpoint):
    options = (str(checkpoint), "ab ab ab", "--no-chat", "--max-tokens", "12", "--dtype", "float32")
    plain = run(*options)
    for method in ("ngram", "lookahead", str(checkpoint)):
        guessed = run(*options, "--speculate", method, "--verbose")
        assert guessed.stdout == plain.stdout
        assert f"{method}: " in guessed.stderr and "proposed tokens accepted" in guessed.stderr


def test_a_guesser_that_is_none_is_told_which_there_are():
    for given, hint in (("lookahed", "did you mean 'lookahead'?"), ("a/b/c", "no such model")):
        with pytest.raises(UserError, match="takes ngram, lookahead or a smaller") as refused:
            guesser_of(given)
        assert f"got '{given}'" in str(refused.value) and hint in str(refused.value)


def test_the_kernel_of_packed_linears_may_be_named(checkpoint):
    options = (str(checkpoint), "hi", "--max-tokens", "4", "--device", "cpu")
    told = run(*options, "--verbose", "--linear-kernel", "dequant").stderr
    assert ": dequant" in told and "int4pack_cpu" not in told
    app = typer.Typer()
    app.command()(generate)
    refused = CliRunner().invoke(app, [*options, "--linear-kernel", "marlin"])
    assert "unknown linear kernel 'marlin'" in str(refused.exception)
