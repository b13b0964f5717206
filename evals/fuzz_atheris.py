"""One target fuzzed by atheris, in a process of its own: evals/fuzz.py starts it.

    python -m lowbit.evals.fuzz_atheris TARGET SOURCES REPORT SECONDS SEED [KEEP]

atheris has to see lowbit's modules while they are imported, and libFuzzer ends the process itself;
so what was found is in the file REPORT after every input.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

LONGEST_INPUT = 4096  # bytes that choices are drawn from
WATCHED = [
    "lowbit.calib",
    "lowbit.quantize",
    "lowbit.evals.mutations",
    "lowbit.evals.gguf_mutations",
]


def main() -> None:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=WATCHED):
        from .fuzzer import SLOWEST, Fuzzer, limit_memory, quiet
    quiet()
    target, sources, report, seconds, seed, *keep = sys.argv[1:]
    limit_memory()
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(keep[0]) if keep else None
        fuzzer = Fuzzer(target, Path(sources), Path(scratch), kept, timed=False)

        def one(data: bytes) -> None:
            drawn = atheris.FuzzedDataProvider(data)
            try:
                fuzzer.try_one(lambda n: drawn.ConsumeIntInRange(0, n - 1))
            except KeyboardInterrupt:
                raise
            except BaseException:  # noted; libFuzzer would stop at the first
                pass
            Path(report).write_text(json.dumps(fuzzer.facts()), encoding="utf-8")

        options = [
            f"-max_total_time={int(float(seconds))}", f"-seed={int(seed) + 1}",
            f"-timeout={SLOWEST}", f"-max_len={LONGEST_INPUT}", "-len_control=0", "-rss_limit_mb=0",
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *options], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
