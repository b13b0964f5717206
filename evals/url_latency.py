"""How long a server takes to answer one client, beside what its answers are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .bench.load import ClosedLoop, Lengths
from .bench.plan import BenchPlan
from .bench.session import Say, bench_url
from .speed import PROMPT_TOKENS, SpeedPlan

REQUESTS = 4  # of a run


def measure_latency(
    url: str, name: str | None, api_key: str | None, folder: Path, text: str, say: Say
) -> dict[str, Any]:
    """What `quantize bench --url` measures of one client, as a results file's row has it; prompts
    and answers as long as those of `quantize eval --speed`.

    folder: of the tokenizer. UserError where nobody answers.
    """
    plan = BenchPlan(
        (ClosedLoop(1),), REQUESTS, Lengths(PROMPT_TOKENS, PROMPT_TOKENS),
        Lengths(SpeedPlan.new_tokens, SpeedPlan.new_tokens),
    )  # fmt: skip
    return bench_url(url, name, api_key, folder, plan, text, say)["rows"][0]["bench"]
