"""One engine that generates, told what to run line by line: how `serving_bench` times them all.

    PYTHON serving_engines.py ENGINE MODEL THREADS [OPTION]   PYTHON: of an environment that has it

Loads MODEL, says {"ready": what it is}, and answers each line {"prompts": lists of token ids,
"new": n} on its standard input with {"seconds": of generating n tokens a prompt, greedily and
without an end}. This file stands alone: it imports nothing of lowbit but for lowbit itself, and
each engine when it is asked to, since what they need clashes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

Generate = Callable[[list[list[int]], int], Any]


class Engine(NamedTuple):
    """name: with its version and dtype. generate: of prompts and a number of new tokens."""

    name: str
    generate: Generate


def lowbit(model: str, threads: int, option: str) -> Engine:
    """Ours; option: "head8" for an output head of 8 bits, else the name of a linear_kernel."""
    import torch
    from lowbit.runtime import LLM, SamplingParams

    torch.set_num_threads(threads)
    head_bits = 8 if option == "head8" else None
    kernel = None if head_bits else option or None
    llm = LLM(model, linear_kernel=kernel, head_bits=head_bits, enable_prefix_caching=False)
    kernels = sorted({report.kernel for report in llm.linear_report()}) or ["plain"]

    def generate(prompts: list[list[int]], new: int) -> None:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    head = ", head of 8 bits" if head_bits else ""
    return Engine(f"lowbit, {_dtype(llm.dtype)}, {', '.join(kernels)}{head}", generate)


def transformers(model: str, threads: int, option: str) -> Engine:
    """transformers' own generate on equal prompts; option: the dtype (bfloat16)."""
    import torch
    import transformers as library

    torch.set_num_threads(threads)
    dtype = getattr(torch, option or "bfloat16")
    loaded: Any = library.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def generate(prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        loaded.generate(
            ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip

    return Engine(f"transformers {library.__version__} generate, {_dtype(dtype)}", generate)


def transformers_batch(model: str, threads: int, option: str) -> Engine:
    """transformers' continuous batching; option: the dtype (bfloat16)."""
    import torch
    import transformers as library

    torch.set_num_threads(threads)
    dtype = getattr(torch, option or "bfloat16")
    loaded: Any = library.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def generate(prompts: list[list[int]], new: int) -> None:
        config = library.GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        done = loaded.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        if any(len(said.generated_tokens) != new for said in done.values()):
            raise RuntimeError("generate_batch gave fewer tokens than it was asked for")

    return Engine(f"transformers {library.__version__} generate_batch, {_dtype(dtype)}", generate)


def vllm(model: str, threads: int, option: str) -> Engine:
    """vLLM's CPU build; option: "compiled", or "eager" (the default)."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm as library

    llm = library.LLM(
        model, dtype="bfloat16", max_model_len=2048, enforce_eager=option != "compiled",
        enable_prefix_caching=False,
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> None:
        params = library.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return Engine(f"vLLM {library.__version__}, {option or 'eager'}", generate)


def llama(model: str, threads: int, option: str) -> Engine:
    """llama.cpp by llama-cpp-python, whose interface takes one sequence at a time."""
    import llama_cpp as library

    llm = library.Llama(
        model, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate(prompts: list[list[int]], new: int) -> None:
        if len(prompts) > 1:
            raise NotImplementedError("its Python interface takes one sequence at a time")
        llm.reset()
        for _, _ in zip(range(new), llm.generate(prompts[0], temp=0.0), strict=False):
            pass

    return Engine(f"llama-cpp-python {library.__version__}", generate)


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


ENGINES = {
    "lowbit": lowbit, "transformers": transformers, "transformers_batch": transformers_batch,
    "vllm": vllm, "llama": llama,
}  # fmt: skip


def main() -> None:
    name, model, threads, *option = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    engine = ENGINES[name](model, int(threads), option[0] if option else "")
    _say(answers, {"ready": engine.name})
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        try:
            engine.generate(asked["prompts"], asked["new"])
            answer: dict[str, Any] = {"seconds": time.perf_counter() - started}
        except NotImplementedError as e:
            answer = {"cannot": str(e)}
        _say(answers, answer)


if __name__ == "__main__":
    # a file's own folder comes first on the path, and has modules named like other packages'
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != os.path.dirname(__file__)]
    main()
