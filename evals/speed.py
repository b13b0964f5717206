"""Decode speed and peak memory of a checkpoint in our runtime, measured in a process of its own.

A fresh process, since peak memory is a high-water mark of a whole process and another model's pages
would count. One request at a time, greedy, end-of-sequence ignored, after a warm-up; the median of
the repeats, with the slowest and the fastest beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels.errors import UserError

PROMPT_TOKENS = 64  # of the prompt whose continuation is timed
WARM_UP_TOKENS = 8
# The working folder is taken off the path: a folder in it could shadow a package of the same name.
CHILD = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    "sys.path[:] = [p for p in sys.path if p];"
    "from lowbit.evals.speed import child; child()"
)


@dataclass(frozen=True)
class SpeedPlan:
    """`prompt`: token ids. `dtype`, `kv`: the runtime's, `kv` of its cache. `threads`: None leaves
    torch's."""

    prompt: list[int]
    new_tokens: int = 64
    repeats: int = 3
    dtype: str = "auto"
    threads: int | None = None
    kv: str = "auto"

    def __post_init__(self) -> None:
        if not self.prompt or self.new_tokens < 2 or self.repeats < 1:
            raise UserError(
                "speed needs at least 1 prompt token, 2 new tokens and 1 repeat, got "
                f"{len(self.prompt)}, {self.new_tokens} and {self.repeats}"
            )


class DecodeSpeed(NamedTuple):
    """Tokens per second of one request: median, slowest and fastest of `repeats`.

    Decode tokens are those after the first; the first one is prefill's. Peak memory in bytes: of
    the process (resident, code included), and of the GPU's allocator where one was used.
    `kernels`: how many packed linears ran on which.
    """

    decode: float
    decode_min: float
    decode_max: float
    prefill: float
    peak_memory: int
    peak_device_memory: int | None
    prompt_tokens: int
    new_tokens: int
    repeats: int
    dtype: str
    kernels: dict[str, int]


def decode_speed(folder: str | Path, plan: SpeedPlan, device: str = "auto") -> DecodeSpeed:
    """Measure in this process; its memory so far counts."""
    import torch

    from ..runtime import LLM, SamplingParams

    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    llm = LLM(
        str(folder),
        device=device,
        dtype=plan.dtype,
        kv_cache_dtype=plan.kv,
        enable_prefix_caching=False,  # repeats would find their prompt there
    )

    def run(tokens: int) -> Any:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return llm.generate([plan.prompt], params, use_tqdm=False)[0].metrics

    room = llm.max_model_len - len(plan.prompt)
    if room < plan.new_tokens:
        raise UserError(
            f"speed asks for {plan.new_tokens} new tokens, but {folder} has room for {room} after "
            f"a prompt of {len(plan.prompt)}"
        )
    run(min(WARM_UP_TOKENS, plan.new_tokens))
    runs = [run(plan.new_tokens) for _ in range(plan.repeats)]
    decode = [m.decode_tokens / m.decode_seconds for m in runs]
    on_gpu = llm.device.type == "cuda"
    return DecodeSpeed(
        decode=statistics.median(decode),
        decode_min=min(decode),
        decode_max=max(decode),
        prefill=statistics.median(m.prefill_tokens / m.prefill_seconds for m in runs),
        peak_memory=peak_memory(),
        peak_device_memory=torch.cuda.max_memory_allocated(llm.device) if on_gpu else None,
        prompt_tokens=len(plan.prompt),
        new_tokens=plan.new_tokens,
        repeats=plan.repeats,
        dtype=str(llm.dtype).removeprefix("torch."),
        kernels=dict(Counter(report.kernel for report in llm.linear_report())),
    )


def decode_speed_apart(folder: str | Path, plan: SpeedPlan, device: str = "auto") -> DecodeSpeed:
    """The same in a fresh process. Raises UserError for what the user can mend, also when it is
    killed (as for want of memory)."""
    request = json.dumps([str(folder), asdict(plan), device])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        out, _ = child.communicate(request)
    except BaseException:
        child.kill()
        child.wait()
        raise
    if child.returncode < 0:
        raise UserError(
            f"the process that measured {folder} was killed by signal {-child.returncode}; "
            "signal 9 is most often want of memory"
        )
    if child.returncode > 0:
        raise RuntimeError(f"measuring {folder} failed with exit code {child.returncode}")
    answer = json.loads(out.splitlines()[-1])
    if "error" in answer:
        raise UserError(answer["error"])
    return DecodeSpeed(**answer)


def child() -> None:
    """The fresh process: a request on standard input, one line of JSON on standard output."""
    folder, plan, device = json.load(sys.stdin)
    try:
        answer = decode_speed(folder, SpeedPlan(**plan), device)._asdict()
    except UserError as e:
        answer = {"error": str(e)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def peak_memory() -> int:
    """Bytes that this process has held resident at most.

    On Linux from /proc: getrusage's figure starts at what the parent held when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
