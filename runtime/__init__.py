"""Run a model: an original folder or a quantized checkpoint, from prompts to text.

Each name is imported when it is first asked for: what schedules needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .llm import LLM
    from .metrics import EngineMetrics
    from .request import CompletionOutput, RequestFailed, RequestMetrics, RequestOutput
    from .sampling.beams import BeamSearchOutput, BeamSearchSequence
    from .sampling.logprobs import Logprob
    from .sampling.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
    from .streams import EngineDeadError, NotStarted

__all__ = [
    "LLM", "AsyncEngine", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence",
    "CompletionOutput", "EngineDeadError", "EngineMetrics", "Logprob", "NotStarted",
    "RequestFailed", "RequestMetrics", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams",
]  # fmt: skip

_MODULES = {
    "llm": ("LLM",),
    "async_engine": ("AsyncEngine",),
    "streams": ("EngineDeadError", "NotStarted"),
    "metrics": ("EngineMetrics",),
    "request": ("CompletionOutput", "RequestFailed", "RequestMetrics", "RequestOutput"),
    "sampling.beams": ("BeamSearchOutput", "BeamSearchSequence"),
    "sampling.logprobs": ("Logprob",),
    "sampling.params": ("BeamSearchParams", "SamplingParams", "StructuredOutputsParams"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
