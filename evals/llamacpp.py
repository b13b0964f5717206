"""Run a GGUF file in the real llama.cpp, through the package `xllamacpp` (optional).

It is llama.cpp's own server held in this process: token ids go in and come out, so that no
tokenizer stands between what is compared. Generation is greedy.

llama.cpp rounds the input of every quantized matrix to 8 bits in blocks of 32 (as Q8_0 does), and
by default keeps keys and values in float16. So on the same weights its log-probabilities differ
from exact arithmetic's (SmolLM2-135M in Q8_0: by up to 0.5 among the likeliest 20), and near-ties
may fall the other way. `precise` takes away what can be taken away, the second.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..kernels.errors import UserError


def available() -> bool:
    """Whether the package `xllamacpp` is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


def generate(gguf_path: str | Path, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy continuation of `prompt_ids`: `max_tokens` ids, fewer where an end token (included)
    comes before."""
    return LlamaCpp(gguf_path, len(prompt_ids) + max_tokens).generate(prompt_ids, max_tokens)


class LlamaCpp:
    """A GGUF file loaded by llama.cpp, on the CPU. Its memory is freed with the object.

    `context`: tokens that a prompt and its continuation may have together; `threads`: None for
    llama.cpp's choice; `precise`: float32 keys and values, plain attention, no repacked weights.
    UserError when `xllamacpp` is missing or llama.cpp cannot load the file.
    """

    def __init__(
        self,
        gguf_path: str | Path,
        context: int = 2048,
        threads: int | None = None,
        precise: bool = False,
    ) -> None:
        if not available():
            raise UserError("running a GGUF file needs llama.cpp: pip install xllamacpp")
        if not Path(gguf_path).is_file():
            raise UserError(f"no such GGUF file: {gguf_path}")
        xllamacpp: Any = importlib.import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf_path)
        params.n_ctx = -(-context // 32) * 32
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.warmup = False
        params.verbosity = -1
        if threads is not None:
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        if precise:
            off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.flash_attn_type = off
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.no_extra_bufts = True
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as e:
            raise UserError(f"llama.cpp cannot load {gguf_path}: {e}") from e

    def generate(
        self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = False
    ) -> list[int]:
        """Greedy continuation of `prompt_ids`: `max_tokens` ids, or up to an end token."""
        return [step["id"] for step in self._complete(prompt_ids, max_tokens, 1, ignore_eos)]

    def next_logprobs(self, prompt_ids: Sequence[int], top: int) -> dict[int, float]:
        """Log-probabilities of the `top` likeliest ids after `prompt_ids`."""
        step = self._complete(prompt_ids, 1, top, True)[0]
        return {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text` by the file's own tokenizer; special tokens in it are recognised."""
        body = {"content": text, "add_special": add_special, "parse_special": True}
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=60) as response:
            return json.load(response)["tokens"]

    def _complete(
        self, prompt_ids: Sequence[int], max_tokens: int, top: int, ignore_eos: bool
    ) -> list[dict[str, Any]]:
        """llama.cpp's account of each generated token."""
        answer = self._server.handle_completions(
            {
                "prompt": list(prompt_ids),
                "n_predict": max_tokens,
                "temperature": 0.0,
                "n_probs": top,
                "ignore_eos": ignore_eos,
                "cache_prompt": False,
            }
        )
        if "choices" not in answer:
            raise UserError(f"llama.cpp refused the prompt: {json.dumps(answer)[:300]}")
        return (answer["choices"][0]["logprobs"] or {"content": []})["content"]
