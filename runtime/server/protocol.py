"""Bodies of requests: OpenAI's fields, and vLLM's beside them. Unknown ones are refused.

Fields that concern OpenAI's own business (user, store, metadata, ...) are taken and mean nothing
here. What a value may be is checked where it is used: sampling by SamplingParams.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..sampling.params import ParamError, SamplingParams, StructuredOutputsParams
from .validation import shown

_TOKEN = re.compile(r"-?\d{1,20}", re.ASCII)
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 256  # of one request
MAX_STOPS = 16
DEFAULT_TOKENS = 16  # of /v1/completions, as OpenAI has it


class Body(BaseModel):
    """null is as good as nothing for a field that has something else by default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_nulls_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        return {
            name: value
            for name, value in given.items()
            if value is not None or name not in fields or fields[name].get_default() is None
        }


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's; exactly one."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(Body):
    """What completions and chats have in common."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def structure_field(self) -> str:
        """Which says what the text must be."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def sampling(self, max_tokens: int, **more: Any) -> SamplingParams:
        """ParamError for values that cannot be."""
        if self.stream_options is not None and not self.stream:
            raise ParamError(
                "stream_options", "stream_options is for requests with stream: leave it out"
            )
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ParamError("stop", f"stop has {len(self.stop)} strings: {MAX_STOPS} at most")
        names = (
            "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p",
            "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos",
            "include_stop_str_in_output",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        more.setdefault("structured_outputs", self._structure())
        return SamplingParams(
            max_tokens=max_tokens,
            n=self.n,
            seed=None if self.seed is None else self.seed % (1 << 64),
            stop=self.stop or None,
            logit_bias=_bias(self.logit_bias),
            **given,
            **more,
        )

    def _structure(self) -> StructuredOutputsParams | None:
        asked, own = self.response_format, self.structured_outputs
        if asked is None or asked.type == "text":
            if own is None:
                return None
            return StructuredOutputsParams(
                own.json_, own.regex, own.choice, own.grammar, bool(own.json_object)
            )
        if own is not None:
            raise ParamError(
                "structured_outputs",
                "response_format and structured_outputs exclude each other: give one",
            )
        if asked.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if asked.json_schema is None:
            raise ParamError(
                "response_format.json_schema",
                "response_format of type json_schema needs json_schema",
            )
        return StructuredOutputsParams(json=asked.json_schema.schema_)


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[Any]:
        """Each a text or token ids."""
        if self.suffix:
            raise ParamError("suffix", "suffix is not supported: this model completes at the end")
        if self.best_of not in (None, self.n):
            raise ParamError(
                "best_of", f"best_of is {self.best_of}: only n, {self.n}, is supported"
            )
        return as_prompts(self.prompt, "prompt")

    def params(self, most: int) -> SamplingParams:
        asked = min(DEFAULT_TOKENS, most) if self.max_tokens is None else self.max_tokens
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo:
            more["prompt_logprobs"] = self.logprobs
        return self.sampling(asked, **more)


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        instead = self.role == "assistant" and (self.tool_calls or self.refusal)
        if (self.content is None or self.content == []) and not instead:
            raise PydanticCustomError(
                "no_content", "only an assistant's message with tool_calls may go without"
            )
        return self


class Function(Body):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def structure_field(self) -> str:
        forced = self.tools and self.tool_choice not in (None, "none", "auto")
        return "tools" if forced else super().structure_field

    def asked_tokens(self) -> tuple[int | None, str]:
        """How many, and the field that says so."""
        if self.max_completion_tokens is None:
            return self.max_tokens, "max_tokens"
        return self.max_completion_tokens, "max_completion_tokens"

    def counted_logprobs(self) -> int | None:
        """As SamplingParams has it."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ParamError("top_logprobs", "top_logprobs needs logprobs: true")
            return None
        return self.top_logprobs or 0


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: list[Tool] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


class EmbeddingRequest(Body):
    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


def as_prompts(given: str | list[Any], field: str) -> list[Any]:
    """One text or list of token ids, or several, as a list of them. field: whose value it is."""
    alone = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    prompts: list[Any] = [given] if alone else list(given)
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ParamError(field, f"{field} has {len(prompts)} texts: from 1 to {MAX_PROMPTS} may be")
    return prompts


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    wrong = next((token for token in given if not _TOKEN.fullmatch(token)), None)
    if wrong is not None:
        raise ParamError(
            "logit_bias", f"logit_bias must give numbers to token ids, got {shown(wrong)}"
        )
    return {int(token): bias for token, bias in given.items()}
