"""What vLLM generates from checkpoints: run by tests/test_vllm.py in a Python that has it.

Arguments: DTYPE PROMPTS TOKENS FOLDER... PROMPTS is a JSON file of lists of token ids. Writes
FOLDER.DTYPE.json for each: {"linears": names of the methods that run its quantized linears,
"outputs": for every prompt the greedy "token_ids" and, for each of them, "logprobs", {id: value} of
the five likeliest}.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_CPU_INT4_W4A8"] = "0"  # with AMX it would quantize W4A16's inputs
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]


def linear_methods(model: Any) -> list[str]:
    """The classes that run the decoder's linears, with the kernel where they hold one."""
    found: set[str] = set()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not name.endswith("_proj"):
            continue
        scheme = getattr(module, "scheme", method)
        kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
        found.add(type(scheme).__name__ + (f" on {type(kernel).__name__}" if kernel else ""))
    return sorted(found)


def generate(folder: str, dtype: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    llm = LLM(folder, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=4)
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5)
    made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    outputs = []
    for request in made:
        completion = request.outputs[0]
        steps = [{i: p.logprob for i, p in step.items()} for step in completion.logprobs]
        outputs.append({"token_ids": list(completion.token_ids), "logprobs": steps})
    return {"linears": llm.apply_model(linear_methods)[0], "outputs": outputs}


if __name__ == "__main__":
    dtype, prompts_file, tokens, *folders = sys.argv[1:]
    with open(prompts_file) as f:
        prompts = json.load(f)
    for folder in folders:
        made = generate(folder, dtype, prompts, int(tokens))
        with open(f"{folder}.{dtype}.json", "w") as f:
            json.dump(made, f)
