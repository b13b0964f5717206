"""The schema of what `quantize bench` writes into a row of a results file."""

from __future__ import annotations

from ..schema_words import COUNT, NUMBER, SHARE, STRING, Schema, maybe, record

SPREAD = record({"median": NUMBER, "low": NUMBER, "high": NUMBER})
QUANTILES = record({"p50": SPREAD, "p90": SPREAD, "p99": SPREAD})
CHECK = record({
    "requests": COUNT, "tokens": COUNT, "agreement": maybe(SHARE), "bar": maybe(SHARE),
    "failed": maybe(STRING),
})  # fmt: skip
LOAD = record({
    "arrivals": {"enum": ["closed", "poisson"]}, "concurrency": maybe(COUNT), "rate": maybe(NUMBER),
    "requests": COUNT, "prompt_low": COUNT, "prompt_high": COUNT, "output_low": COUNT,
    "output_high": COUNT, "shared_prefix": COUNT, "seed": {"type": "integer"}, "source": STRING,
})  # fmt: skip
SERVED = record({
    "variant": STRING, "load": LOAD, "repeats": COUNT, "check": CHECK, "ttft": maybe(QUANTILES),
    "tpot": maybe(QUANTILES), "itl": maybe(QUANTILES), "output_tokens_per_second": maybe(SPREAD),
    "requests_per_second": maybe(SPREAD), "goodput": maybe(SPREAD),
})  # fmt: skip
RATIO = record({
    "variant": STRING, "against": STRING, "load": LOAD, "output_tokens_per_second": SPREAD,
    "ttft": SPREAD, "tpot": maybe(SPREAD),
})  # fmt: skip
CELL = record({
    "variant": STRING, "batch": COUNT, "context": COUNT, "repeats": COUNT, "check": CHECK,
    "prefill": maybe(SPREAD), "decode": maybe(SPREAD),
})  # fmt: skip
MEMORY = record({
    "weights": COUNT, "kv": COUNT, "kv_touched": maybe(COUNT), "activations": maybe(COUNT),
    "process": COUNT,
})  # fmt: skip
CEILINGS = record({"bandwidth": NUMBER, "matmul": NUMBER, "dtype": STRING})
PHASE = record({
    "phase": {"enum": ["prefill", "decode"]}, "batch": COUNT, "context": COUNT, "seconds": NUMBER,
    "memory": NUMBER, "compute": NUMBER, "bound": {"enum": ["memory", "compute"]}, "share": NUMBER,
    "weight_bytes_per_token": NUMBER, "kv_bytes_per_token": NUMBER,
})  # fmt: skip
ROOFLINE = record({
    "ceilings": CEILINGS, "weight_bytes": COUNT, "kv_bytes_per_token": NUMBER,
    "phases": {"type": "array", "items": PHASE},
})  # fmt: skip
SLO = record({"ttft": maybe(NUMBER), "tpot": maybe(NUMBER), "e2e": maybe(NUMBER)})
OPTIONS: Schema = {"type": "object", "additionalProperties": STRING}
BENCH = record({
    "engine": STRING, "options": {"type": "object", "additionalProperties": OPTIONS},
    "slo": maybe(SLO), "loads": {"type": "array", "items": SERVED},
    "ratios": {"type": "array", "items": RATIO}, "sweep": {"type": "array", "items": CELL},
    "memory": {"type": "object", "additionalProperties": MEMORY}, "roofline": maybe(ROOFLINE),
})  # fmt: skip
