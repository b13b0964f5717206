"""Calls of tools in what a model writes: Hermes' and Qwen's tags, Llama 3's bare JSON, and JSON
that a grammar has forced.

A parser takes the text as it comes and hands out what is certainly text, and calls when they are
whole. What looks like a call and is none, or names no tool of the request, stays text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, Protocol

from ...kernels.errors import UserError, did_you_mean
from ..sampling.params import ParamError, StructuredOutputsParams
from .protocol import ChatRequest, NamedTool, Tool

_START, _END = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """arguments: JSON as text."""

    name: str
    arguments: str


class Said(NamedTuple):
    text: str
    calls: list[Call]


class Parser(Protocol):
    def push(self, text: str) -> Said:
        """What `text` completes."""
        ...

    def finish(self) -> Said:
        """No more comes."""
        ...


class Plain:
    """Nothing is a call."""

    def push(self, text: str) -> Said:
        return Said(text, [])

    def finish(self) -> Said:
        return Said("", [])


class Hermes:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere, once or often."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held, self._inside = names, "", False

    def push(self, text: str) -> Said:
        self._held += text
        told, calls = "", list[Call]()
        while True:
            tag = _END if self._inside else _START
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if not self._inside:
                told += before
            elif call := _call(before, self._names):
                calls.append(call)
            else:
                told += _START + before + _END
            self._held, self._inside = after, not self._inside
        if not self._inside:
            certain = len(self._held) - _begun(self._held, _START)
            told, self._held = told + self._held[:certain], self._held[certain:]
        return Said(told, calls)

    def finish(self) -> Said:
        held, self._held = self._held, ""
        if self._inside and (call := _call(held, self._names)):  # its end was a stop token
            return Said("", [call])
        return Said(_START + held if self._inside else held, [])


class Llama3:
    """{"name": ..., "parameters": {...}} and nothing else, several with semicolons between them. A
    text that begins otherwise is one."""

    _TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held, self._is_text = names, "", False

    def push(self, text: str) -> Said:
        if self._is_text:
            return Said(text, [])
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or self._TAG.startswith(begun[: len(self._TAG)]):
            return Said("", [])
        self._is_text = True
        return self.finish()

    def finish(self) -> Said:
        held, self._held = self._held, ""
        calls = [] if self._is_text else self._calls(held.lstrip().removeprefix(self._TAG))
        return Said("", calls) if calls else Said(held, [])

    def _calls(self, text: str) -> list[Call]:
        """None where anything in `text` is no call."""
        decoder, calls = json.JSONDecoder(), []
        while text := text.strip().lstrip(";").lstrip():
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            call = _as_call(value, self._names)
            if call is None:
                return []
            calls.append(call)
            text = text[end:]
        return calls


class Forced:
    """JSON that a grammar has made: a list of calls, or the arguments of the one tool `name`."""

    def __init__(self, names: Collection[str], name: str | None) -> None:
        self._names, self._name, self._held = names, name, ""

    def push(self, text: str) -> Said:
        self._held += text
        return Said("", [])

    def finish(self) -> Said:
        if self._name is not None:
            return Said("", [Call(self._name, self._held)])
        try:
            calls = [_as_call(value, self._names) for value in json.loads(self._held)]
        except ValueError:  # cut off at max_tokens
            return Said(self._held, [])
        return Said("", [call for call in calls if call is not None])


class ToolUse(NamedTuple):
    """What a request's tools come to. tools: for the chat template. structure: what the text must
    be, where a tool has to be called."""

    tools: list[dict[str, Any]] | None
    structure: StructuredOutputsParams | None
    kind: Literal["plain", "hermes", "llama3", "forced"]
    name: str | None = None

    def parser(self) -> Parser:
        """A new one, for one continuation."""
        names = {tool["function"]["name"] for tool in self.tools or ()}
        if self.kind == "forced":
            return Forced(names, self.name)
        if self.kind == "plain":
            return Plain()
        return Hermes(names) if self.kind == "hermes" else Llama3(names)


def tool_use(body: ChatRequest, tokenizer: Any | None, setting: str) -> ToolUse:
    """UserError where the model or the server cannot do what `body` asks."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ParamError("tool_choice", "tool_choice needs tools")
        return ToolUse(None, None, "plain")
    if choice == "none":
        return ToolUse(None, None, "plain")
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise ParamError("tools", "tools have names that are alike: each needs one of its own")
    template = "" if tokenizer is None else _template(tokenizer)
    if "tools" not in template:
        raise ParamError("tools", "the model's chat template takes no tools: leave them out")
    told = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if choice in (None, "auto"):
        return ToolUse(told, None, _format(setting, template))
    if body.response_format is not None or body.structured_outputs is not None:
        field = "response_format" if body.structured_outputs is None else "structured_outputs"
        raise ParamError(field, f"tool_choice says what the answer is: leave {field} out")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise ParamError(
                "tool_choice.function.name",
                f"tool_choice names no tool '{name}'{did_you_mean(name, names)}",
            )
        schema = _parameters(body.tools[names.index(name)])
        return ToolUse(told, StructuredOutputsParams(json=schema), "forced", name)
    schema = _calls_schema(body.tools, one=body.parallel_tool_calls is False)
    return ToolUse(told, StructuredOutputsParams(json=schema), "forced")


def _template(tokenizer: Any) -> str:
    return tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""


def _format(setting: str, template: str) -> Literal["plain", "hermes", "llama3"]:
    if setting == "hermes" or (setting == "auto" and _START in template):
        return "hermes"
    if setting == "llama3" or (
        setting == "auto" and ("python_tag" in template or '"parameters"' in template)
    ):
        return "llama3"
    if setting == "none":
        return "plain"
    raise UserError(
        "how the model writes tool calls cannot be told from its chat template: start the server "
        "with --tool-parser"
    )


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _calls_schema(tools: list[Tool], one: bool) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": t.function.name}, "parameters": _parameters(t)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for t in tools
    ]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return {**schema, "maxItems": 1} if one else schema


def _call(text: str, names: Collection[str]) -> Call | None:
    try:
        return _as_call(json.loads(text), names)
    except (ValueError, RecursionError):
        return None


def _as_call(value: Any, names: Collection[str]) -> Call | None:
    """None where it is none, or of an unknown tool."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if tag.startswith(text[-n:])), 0)
