"""From what a user gives, prompts and parameters, to requests that an engine can run: every mistake
that can be seen before anything runs is refused here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

from jinja2 import TemplateError

from ..kernels.errors import UserError
from .loader import LoadedModel
from .request import Request
from .sampling.beams import BeamRequest
from .sampling.grammar import CompiledGrammar, GrammarCompiler
from .sampling.params import (
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
    check_vocabulary,
)

Prompt: TypeAlias = "str | Sequence[int] | dict[str, Any]"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"
Messages: TypeAlias = "Sequence[dict[str, str]]"


class PromptTooLong(UserError):
    """It leaves no room for an output in the model's context."""


class RequestMaker:
    """For one model. vocab_size: of its logits. max_model_len: prompt and output together."""

    def __init__(self, loaded: LoadedModel, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer, self._eos_token_ids = loaded.tokenizer, loaded.eos_token_ids
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._reading = threading.Lock()  # one text is tokenized at a time

    def request(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """prompt: a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}. grammar: of
        params.structured_outputs; compiled here where it is None."""
        text, token_ids = self._read(prompt)
        if params.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and the model folder has none")
        check_vocabulary(params, self._vocab_size)
        if params.structured_outputs is not None and grammar is None:
            grammar = self.grammar(params.structured_outputs)
        return Request(
            text, token_ids, params, min(params.max_tokens, self._room(token_ids)),
            self._eos_token_ids, self.tokenizer, request_id=request_id, grammar=grammar,
        )  # fmt: skip

    def grammar(self, structured: StructuredOutputsParams) -> CompiledGrammar:
        """UserError where there can be none."""
        return self._grammars.compile(structured)

    def beams(self, prompt: Any, params: BeamSearchParams) -> BeamRequest:
        _, token_ids = self._read(prompt)
        return BeamRequest(
            token_ids, params, min(params.max_tokens, self._room(token_ids)),
            self._eos_token_ids, self.tokenizer,
        )  # fmt: skip

    def requests(
        self, prompts: list[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """params: one for all prompts or one for each."""
        given = SamplingParams() if params is None else params
        each = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts need as many sampling_params or one for all, got "
                f"{len(each)}"
            )
        return [self.request(p, s) for p, s in zip(prompts, each, strict=True)]

    def chat_prompt(
        self, messages: Any, *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> dict[str, Any]:
        """What the chat template makes of a conversation, as a prompt. tools: functions that the
        model may call, as JSON schemas; options: other names that the template reads."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise UserError("the model has no chat template: use generate with a plain prompt")
        if not messages:
            raise UserError("the conversation is empty: it must have at least one message")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
        except (TemplateError, TypeError, ValueError) as e:
            raise UserError(f"the chat template does not take this conversation: {e}") from e
        return {"prompt": text, "prompt_token_ids": self.tokenize(text, add_special_tokens=False)}

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise UserError("the model folder has no tokenizer: give the prompt as token ids")
        check_text(text)
        with self._reading:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._vocab_size, self._eos_token_ids)

    def _room(self, token_ids: list[int]) -> int:
        """Tokens that the output of a prompt can have."""
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens, but prompt and output together may have "
                f"{self._max_model_len}: shorten it"
            )
        return room

    def _read(self, prompt: Any) -> tuple[str | None, list[int]]:
        """Text, where it was given as that, and token ids."""
        text, token_ids = self._tokenize(prompt)
        if not token_ids:
            raise UserError("the prompt is empty: it must have at least one token")
        outside = [t for t in token_ids if not 0 <= t < self._vocab_size]
        if outside:
            raise UserError(
                f"token id {outside[0]} is out of the vocabulary: ids go from 0 to "
                f"{self._vocab_size - 1}"
            )
        return text, token_ids

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if not ({"prompt", "prompt_token_ids"} & prompt.keys()):
                raise UserError(
                    "a prompt given as a dict needs 'prompt' or 'prompt_token_ids', got "
                    f"{sorted(prompt)}"
                )
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids")
            return (text, list(ids)) if ids is not None else self._tokenize(text)
        if not isinstance(prompt, str):
            return None, list(prompt)
        return prompt, self.tokenize(prompt)


def check_text(text: str) -> None:
    """UserError where `text` holds half of a character, which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UserError(
            f"the prompt is no Unicode text: at position {e.start} it has one half of a surrogate "
            "pair alone"
        ) from e


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    prompts = list(prompts)
    if not prompts:
        raise UserError("no prompt was given")
    if all(isinstance(p, int) for p in prompts):
        return [prompts]
    wrong = [p for p in prompts if not isinstance(p, str | dict | Sequence)]
    if wrong:
        raise UserError(
            "a prompt must be a string, a list of token ids or a dict, got "
            f"{type(wrong[0]).__name__}"
        )
    return prompts


def as_conversations(messages: Any) -> list[Any]:
    """One conversation or several, as a list of conversations."""
    messages = list(messages)
    return [messages] if not messages or is_message(messages[0]) else messages


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value
