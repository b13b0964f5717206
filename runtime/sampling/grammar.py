"""Text that must follow a JSON schema, a regular expression or a grammar: which tokens may come
next, by xgrammar (Dong et al. 2024, arXiv:2411.15100). The package is asked for when it is needed.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.errors import UserError
from .params import ParamError, StructuredOutputsParams

CACHE_BYTES = 256 << 20
MAX_DEPTH = 200  # of brackets in a schema, an expression or a grammar
MAX_TOLD = 300  # letters of it in a message
_PLACE = re.compile(
    r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?"
)  # in xgrammar's code


class GrammarCompiler:
    """For one tokenizer and a model whose logits have `vocabulary` columns. A model without an end
    of sequence ends where its grammar does.

    UserError where xgrammar or the tokenizer is not there.
    """

    def __init__(
        self, tokenizer: Any | None, vocabulary: int, eos_token_ids: Iterable[int]
    ) -> None:
        if tokenizer is None:
            raise UserError("structured outputs need a tokenizer, and the model folder has none")
        self._xgrammar = _xgrammar()
        ends = sorted(eos_token_ids)
        self._ends_alone = not ends
        info = self._xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary, stop_token_ids=ends or None
        )
        self._vocabulary = vocabulary
        # It keeps what it has compiled, as far as that goes.
        self._compiler = self._xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """ParamError where xgrammar cannot make a grammar of it, or no text follows it."""
        told = _shortened(params)
        if (depth := _depth(params)) > MAX_DEPTH:
            raise ParamError(
                "structured_outputs",
                f"structured outputs cannot follow {told}: its brackets are {depth} deep, and "
                f"{MAX_DEPTH} are the most; make it flatter",
            )
        try:
            compiled = self._compiled(params)
        except (RuntimeError, ValueError) as e:
            reason = [_PLACE.sub("", line) for line in str(e).strip().splitlines()]
            raise ParamError(
                "structured_outputs",
                f"structured outputs cannot follow {told}: {reason[-1] if reason else e}",
            ) from e
        made = CompiledGrammar(self._xgrammar, compiled, self._vocabulary, self._ends_alone)
        if not made.begin().allowed().any():
            raise ParamError(
                "structured_outputs", f"structured outputs cannot follow {told}: no text does"
            )
        return made

    def _compiled(self, params: StructuredOutputsParams) -> Any:
        if params.json_object:
            return self._compiler.compile_json_schema('{"type": "object"}')
        if params.json is not None:
            text = params.json if isinstance(params.json, str) else json.dumps(params.json)
            return self._compiler.compile_json_schema(text)
        if params.regex is not None:
            return self._compiler.compile_regex(params.regex)
        if params.grammar is not None:
            return self._compiler.compile_grammar(params.grammar)
        words = (json.dumps(word, ensure_ascii=False) for word in params.choice or ())
        return self._compiler.compile_grammar(f"root ::= {' | '.join(words)}")


class CompiledGrammar:
    """What every continuation that follows it begins with."""

    def __init__(
        self, xgrammar: Any, compiled: Any, vocabulary: int, terminate_without_stop_token: bool
    ) -> None:
        self._xgrammar, self._compiled, self._vocabulary = xgrammar, compiled, vocabulary
        self._ends_alone = terminate_without_stop_token

    def begin(self) -> Grammar:
        matcher = self._xgrammar.GrammarMatcher(
            self._compiled, terminate_without_stop_token=self._ends_alone
        )
        return Grammar(matcher, self._xgrammar.allocate_token_bitmask(1, self._vocabulary))


class Grammar:
    """How far one continuation has come."""

    def __init__(self, matcher: Any, bitmask: Tensor) -> None:
        self._matcher, self._bitmask = matcher, bitmask

    def allowed(self, ahead: Sequence[int] = ()) -> Tensor:
        """int32 [words] on the CPU: a bit for each token, set where it may come next, or after the
        tokens `ahead`. Of no meaning where those are not allowed or end it."""
        bitmask, taken = torch.full_like(self._bitmask, -1), 0  # which are left if all are allowed
        for token in ahead:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                break
            taken += 1
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(bitmask, 0)
        if taken:
            self._matcher.rollback(taken)
        return bitmask[0]

    def accept(self, token_id: int) -> bool:
        """False where the token was not allowed: none is, where a grammar leads nowhere."""
        return self._matcher.accept_token(token_id)

    @property
    def is_over(self) -> bool:
        return self._matcher.is_terminated()


def _depth(params: StructuredOutputsParams) -> int:
    """How deep brackets lie in each other: xgrammar's readers call themselves for each."""
    given = params.json if params.json is not None else params.regex or params.grammar or ""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
    except RecursionError:
        return sys.getrecursionlimit()
    depth = deepest = 0
    for letter in text:
        if letter in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")]}":
            depth -= 1
    return deepest


def _shortened(params: StructuredOutputsParams) -> str:
    """What was asked for, in words, and its beginning."""
    if params.json_object:
        return "a JSON object"
    kinds = {"JSON schema": params.json, "regular expression": params.regex,
             "grammar": params.grammar, "choice": params.choice}  # fmt: skip
    kind, given = next((kind, given) for kind, given in kinds.items() if given is not None)
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    except RecursionError:
        return f"the {kind}"
    return f"the {kind} {text[:MAX_TOLD]}{'...' if len(text) > MAX_TOLD else ''}"


def _xgrammar() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ImportError as e:
        raise UserError(
            f"structured outputs need the package xgrammar ({e}): pip install 'lowbit[serve]'"
        ) from e
