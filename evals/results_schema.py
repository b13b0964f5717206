"""The schema of a results file (JSON Schema, draft 2020-12), as data.

`python -m lowbit.evals.results_schema` prints it; docs/results.schema.json is that output. The keys
of a measured value are those of the named tuple that holds it (a test compares them), so a field
that is added there is added here.
"""

from __future__ import annotations

import json
import sys

from .bench.schema import BENCH
from .schema_words import COUNT, FLAG, NUMBER, SHARE, STRING, Schema, maybe, record

PERPLEXITY = record({
    "perplexity": maybe(NUMBER), "perplexity_stderr": maybe(NUMBER), "nll": NUMBER,
    "nll_stderr": maybe(NUMBER), "tokens": COUNT, "windows": COUNT,
})  # fmt: skip
BUCKET = record({
    "low": SHARE, "high": SHARE, "positions": COUNT, "kld_mean": maybe(NUMBER),
    "top1": maybe(SHARE),
})  # fmt: skip
DIVERGENCE = record({
    "kld_mean": NUMBER, "kld_mean_stderr": maybe(NUMBER), "kld_median": NUMBER, "kld_p99": NUMBER,
    "kld_max": NUMBER, "top1": SHARE, "top1_stderr": maybe(NUMBER), "nll_difference": NUMBER,
    "nll_difference_stderr": maybe(NUMBER), "positions": COUNT, "kld_p90": NUMBER,
    "kld_p95": NUMBER, "kld_p999": NUMBER, "top5_overlap": SHARE,
    "top5_overlap_stderr": maybe(NUMBER), "probability_rms": SHARE,
    "probability_rms_stderr": maybe(NUMBER), "probability_mean": NUMBER,
    "probability_mean_stderr": maybe(NUMBER), "confidence": {"type": "array", "items": BUCKET},
}, {"histogram": maybe({"type": "array", "items": COUNT})})  # fmt: skip
SIZE = record({
    "file_bytes": COUNT, "tensor_bytes": COUNT, "weights": maybe(COUNT),
    "bits_per_weight": maybe(NUMBER), "quantized_weights": maybe(COUNT),
    "quantized_bits_per_weight": maybe(NUMBER),
})  # fmt: skip
SPEED = record({
    "decode": NUMBER, "decode_min": NUMBER, "decode_max": NUMBER, "prefill": NUMBER,
    "peak_memory": COUNT, "peak_device_memory": maybe(COUNT), "prompt_tokens": COUNT,
    "new_tokens": COUNT, "repeats": COUNT, "dtype": STRING,
    "kernels": {"type": "object", "additionalProperties": COUNT},
})  # fmt: skip
LINEAR = record({
    "name": STRING, "bits": NUMBER, "method": maybe(STRING), "relative_error": maybe(NUMBER),
})  # fmt: skip
PAIRED = record({
    "only_base": COUNT, "only_model": COUNT, "both": COUNT, "neither": COUNT, "p_value": SHARE,
})  # fmt: skip
TASK = record({
    "task": STRING, "questions": COUNT, "accuracy": SHARE, "accuracy_stderr": maybe(NUMBER),
    "accuracy_norm": SHARE, "accuracy_norm_stderr": maybe(NUMBER), "paired": maybe(PAIRED),
})  # fmt: skip
SAMPLE = record({"prompt": STRING, "base": maybe(STRING), "text": STRING})
GENERATION = record({
    "prompts": COUNT, "new_tokens": COUNT, "repetition": SHARE, "loops": COUNT,
    "same": maybe(COUNT), "first_difference": maybe(NUMBER),
    "differences": maybe({"type": "array", "items": maybe(COUNT)}),
    "samples": {"type": "array", "items": SAMPLE},
})  # fmt: skip
MADE = record(
    {"method": maybe(STRING), "seconds": maybe(NUMBER)},
    {"scheme": maybe(STRING), "peak_memory": maybe(COUNT), "cpu_seconds": maybe(NUMBER)},
)
COMPUTED = record({"name": STRING, "top": maybe(COUNT)})
ROW = record(
    {"name": STRING, "path": STRING, "size": maybe(SIZE)},
    {
        "perplexity": maybe(PERPLEXITY), "divergence": maybe(DIVERGENCE), "speed": maybe(SPEED),
        "kv": maybe(STRING), "linears": maybe({"type": "array", "items": LINEAR}),
        "tasks": maybe({"type": "array", "items": TASK}), "made": maybe(MADE),
        "bench": maybe(BENCH), "generation": maybe(GENERATION),
        "inputs": maybe(STRING), "engine": maybe(COMPUTED),
    },
)  # fmt: skip
WINDOWING = record({
    "ctx": COUNT, "stride": COUNT, "bos": STRING, "windows": maybe(COUNT), "skip": COUNT,
    "predictive": FLAG, "tail": FLAG, "special": FLAG,
})  # fmt: skip
PROTOCOL = record({
    "base": maybe(STRING), "text": STRING, "text_sha256": STRING, "text_description": STRING,
    "tokenizer": STRING, "windowing": WINDOWING, "windows": COUNT, "scored_tokens": COUNT,
    "positions": COUNT, "dtype": STRING, "seed": maybe({"type": "integer"}), "name": maybe(STRING),
})  # fmt: skip
ENVIRONMENT = record({
    "device": STRING, "cpu": STRING, "threads": COUNT, "system": STRING, "python": STRING,
    "packages": {"type": "object", "additionalProperties": STRING},
})  # fmt: skip
SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "lowbit results, version 1",
    "$comment": "Bytes, seconds, nats, shares from 0 to 1; null: not measured. docs/evals.md",
    **record(
        {
            "format": {"const": "lowbit-results"},
            "version": {"const": 1},
            "producer": record({"name": STRING, "version": STRING, "command": STRING}),
            "created": STRING,
            "environment": ENVIRONMENT,
            "protocol": maybe(PROTOCOL),
            "rows": {"type": "array", "items": ROW},
        },
        {
            "seconds": NUMBER,
            "noise_floor": maybe(DIVERGENCE),
            "definitions": {"type": "array", "items": STRING},
        },
    ),
}


def text() -> str:
    """The schema as a file."""
    return json.dumps(SCHEMA, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
