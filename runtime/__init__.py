"""Run a model: an original folder or a quantized checkpoint, from prompts to text.

Each name is imported when it is first asked for: what schedules needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import LLM
    from .request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "llm" if name == "LLM" else "request"
    return getattr(importlib.import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
