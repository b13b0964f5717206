"""What an engine is doing and has done, for evals and servers to read. Of one request:
RequestMetrics in runtime/request.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineMetrics:
    """running, waiting: requests at this moment. kv_usage: the share of KV blocks that running
    requests hold; hit_rate: of prompt tokens, the share that the prefix cache had (None: the engine
    has no blocks). prefill_tokens, output_tokens: computed and drawn since the model was loaded.
    tokens_per_second: output tokens by the seconds in which the engine worked. preemptions: times
    that requests gave up their blocks; swaps: those of them that took them to host memory.
    acceptance_rate: of tokens that speculation proposed; speculation: all about that, None where
    there is none."""

    running: int
    waiting: int
    kv_usage: float | None
    hit_rate: float | None
    prefill_tokens: int
    output_tokens: int
    tokens_per_second: float
    preemptions: int = 0
    swaps: int = 0
    acceptance_rate: float = 0.0
    speculation: SpeculationMetrics | None = None


@dataclass(frozen=True)
class SpeculationMetrics:
    """method: ngram, lookahead or the draft model. active: proposals are being made. proposed,
    accepted: tokens. tokens_per_step: that a continuation got where it had proposals. speedup: of
    tokens a second, over plain decoding of as many sequences as ran last, both measured; None:
    they were not yet. note: the same in words, and why proposals are off where they are."""

    method: str
    active: bool
    proposed: int
    accepted: int
    acceptance_rate: float
    tokens_per_step: float
    speedup: float | None
    note: str
