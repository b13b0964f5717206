"""Run a model: an original folder or a quantized checkpoint, from prompts to text."""

from .llm import LLM
from .request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams"]
