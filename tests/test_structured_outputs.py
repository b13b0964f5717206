"""Whatever a random model draws, its text follows the schema, the expression or the grammar."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, RequestFailed, SamplingParams, StructuredOutputsParams
from lowbit.runtime.sampling.adjust import allow_

from .runtime_models import EOS, FAMILIES, byte_tokenizer, save_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
NO_SPACE = dict.fromkeys(byte_tokenizer()(" \n\t")["input_ids"], -100.0)  # else too much of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    pytest.importorskip("xgrammar", reason="structured outputs need it: lowbit[serve]")
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module", params=["paged", "contiguous"])
def llm(request, folder: Path) -> LLM:
    return LLM(folder, "cpu", "float32", engine=request.param)


def texts(llm: LLM, n: int = 4, bias: dict[int, float] | None = None, **asked: Any) -> list[str]:
    params = SamplingParams(
        temperature=1.5, n=n, seed=1, max_tokens=150, logit_bias=NO_SPACE | (bias or {}),
        structured_outputs=StructuredOutputsParams(**asked),
    )  # fmt: skip
    free = SamplingParams(temperature=1.5, seed=5, max_tokens=20)
    out, other = llm.generate(["Give me", "x"], [params, free], use_tqdm=False)
    assert other.outputs == llm.generate("x", free, use_tqdm=False)[0].outputs, "rows beside it"
    for completion in out.outputs:
        assert completion.finish_reason == "stop" and completion.token_ids[-1] == EOS
    return [completion.text for completion in out.outputs]


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["dict", "text"])
def test_a_json_schema_is_followed(llm, schema):
    made = [json.loads(text) for text in texts(llm, json=schema)]
    for value in made:
        assert set(value) == {"name", "size", "kind"}
        assert re.fullmatch("[a-z]{1,6}", value["name"]) and 0 <= value["size"] <= 99
        assert value["kind"] in ("small", "large")
    assert len({value["name"] for value in made}) > 1


def test_expressions_choices_and_grammars_are_followed(llm):
    made = texts(llm, regex=r"[A-F]{3}-\d{2,4}")
    assert all(re.fullmatch(r"[A-F]{3}-\d{2,4}", text) for text in made) and len(set(made)) > 1
    words = ["yes", 'say "no"\n', "né"]
    for word in words:
        first = byte_tokenizer()(word)["input_ids"][0]
        assert texts(llm, n=2, bias={first: 100.0}, choice=words) == [word] * 2
    made = texts(llm, grammar='root ::= "(" root ")" | "x"')
    assert all(re.fullmatch(r"\(*x\)*", t) and t.count("(") == t.count(")") for t in made)


def test_greedy_and_biased_tokens_stay_within_the_grammar(llm):
    params = SamplingParams(
        temperature=0, max_tokens=9, logit_bias={ord("q"): 100},
        structured_outputs=StructuredOutputsParams(regex="[ab]{3}"),
    )  # fmt: skip
    out = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert re.fullmatch("[ab]{3}", out.text) and out.finish_reason == "stop"


def test_a_model_without_an_end_stops_where_the_grammar_does(tmp_path, folder):
    config = FAMILIES["llama"]()
    config.eos_token_id = None
    llm = LLM(save_tiny(tmp_path / "endless", config), "cpu", "float32")
    params = SamplingParams(
        max_tokens=30, seed=1, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
    )
    out = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert re.fullmatch("[ab]{3}", out.text) and out.finish_reason == "stop"


@pytest.mark.parametrize(
    "asked",
    [{"json": "{"}, {"json": {"type": "nonsense"}}, {"regex": "("}, {"grammar": "root = x"}],
    ids=str,
)
def test_what_is_no_schema_is_refused(folder, asked):
    llm = LLM(folder, "cpu", "float32")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))
    with pytest.raises(UserError, match="structured outputs cannot follow the ") as refused:
        llm.generate("x", params, use_tqdm=False)
    told = str(refused.value)
    assert "Params(" not in told and ".cc:" not in told, "nothing of the program's insides"
    given = next(iter(asked.values()))
    assert (given if isinstance(given, str) else '{"type": "nonsense"}') in told


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"grammar": "root ::= root"}, "no text does"),
        ({"regex": "(" * 300 + "a" + ")" * 300}, "300 deep"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "5001 deep"),
    ],
)
def test_grammars_that_lead_nowhere_or_too_deep_are_refused(llm, asked, reason):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))
    with pytest.raises(UserError, match=reason) as refused:
        llm.generate("x", params, use_tqdm=False)
    assert len(str(refused.value)) < 600


def test_a_grammar_that_comes_to_a_dead_end_fails_its_request_alone(llm):
    dead = StructuredOutputsParams(grammar='root ::= "ab" b\nb ::= b')
    params = [
        SamplingParams(max_tokens=9, temperature=0, ignore_eos=structured is None,
                       structured_outputs=structured)
        for structured in (dead, None)
    ]  # fmt: skip
    expected = llm.generate("x", params[1], use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(RequestFailed, match="its grammar allows no token after [0-2]") as failed:
        llm.generate(["x", "x"], params, use_tqdm=False)
    assert failed.value.outputs[0].outputs[0].finish_reason == "error"
    assert failed.value.outputs[1].outputs[0].token_ids == expected
    assert llm.generate("x", params[1], use_tqdm=False)[0].outputs[0].token_ids == expected


def test_what_is_missing_is_named(folder, tmp_path, monkeypatch):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    bare = save_tiny(tmp_path / "bare", FAMILIES["llama"](), tokenizer=False)
    with pytest.raises(UserError, match="structured outputs need a tokenizer"):
        LLM(bare, "cpu").generate([[1]], params, use_tqdm=False)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UserError, match=r"need the package xgrammar.*lowbit\[serve\]"):
        LLM(folder, "cpu").generate("x", params, use_tqdm=False)


def test_a_bit_allows_a_token_and_what_has_none_is_not_allowed():
    logits = torch.zeros(3, 70)
    bitmask = torch.tensor([[0b101, 0], [-1, -(2**31)]], dtype=torch.int32)
    allow_(logits, torch.tensor([2, 0]), bitmask)
    kept = [row.isfinite().nonzero().squeeze(1).tolist() for row in logits]
    assert kept == [[*range(32), 63], list(range(70)), [0, 2]]
