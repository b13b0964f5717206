"""From the messages of a body to those that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...kernels.errors import UserError
from .protocol import Message, ToolCall

_ROLES = {"developer": "system"}  # OpenAI's newer word, which no template knows


def as_conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_as_dict(message) for message in messages]


def _as_dict(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    told: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role), "content": content or message.refusal or ""
    }  # fmt: skip
    if message.tool_calls:
        told["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            told[name] = value
    return told


def _call(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as e:
        raise UserError(
            f"the arguments of tool call {call.id} are no JSON: {e}; send them as they came"
        ) from e
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
