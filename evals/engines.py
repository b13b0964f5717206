"""What computes the model that is measured, where it is not transformers' own forward pass.

Our runtime gives logits; llama.cpp and servers tell the likeliest tokens (told.py). llama.cpp is
asked position by position: the text's next token is forced there, whose log-probability it then
tells as its own choice's, and its cache holds what went before.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError, did_you_mean
from ..quantize.gguf.as_folder import contents_behind
from .llamacpp import LlamaCpp, available
from .perplexity import Scorer
from .report import Computed
from .scorer import measuring_dtype
from .told import Teller, Told, asked_positions, told_of
from .url_teller import TOPS, UrlTeller
from .windows import Window

LLAMA_CPP_TOP = 4096  # tokens that llama.cpp tells of a position; a whole vocabulary takes seconds
LLAMA_CPP_CONTEXT = 2048  # tokens, at least: a task's texts are longer than windows may be
FORCED = 1e9  # logits that are added to the next token's when it is chosen, not when it is told


class Loading(NamedTuple):
    """Of the model in `folder`. dtype: as of load_scorer; context: tokens of a window."""

    folder: Path
    dtype: str
    device: torch.device
    kv: str
    context: int


class Engine(NamedTuple):
    """computed: for the report. url: of a server; the folder is then its tokenizer's alone, and the
    row has no size."""

    computed: Computed
    load: Callable[[Loading], Scorer | Teller]
    url: str | None = None


class LlamaCppTeller(LlamaCpp):
    """A GGUF file in llama.cpp as it runs by default, on as many threads as torch has."""

    def __init__(self, path: Path, vocabulary: int, context: int) -> None:
        super().__init__(path, context, torch.get_num_threads())
        self.vocabulary = vocabulary
        self._path = path

    def told(self, window: Window, base: Tensor | None) -> Told:
        ids: list[int] = window.ids.tolist()
        top = base is not None
        known: list[dict[int, float]] = [{} for _ in ids]
        for position in asked_positions(window, top):
            known[position] = self._next(ids, position, LLAMA_CPP_TOP if top else 1)
        return told_of(known)

    def _next(self, ids: list[int], position: int, top: int) -> dict[int, float]:
        """Log-probabilities behind `position`: of the text's next token and of the likeliest."""
        follows = ids[position + 1 : position + 2]
        answer = self._server.handle_completions({
            "prompt": ids[: position + 1], "n_predict": 1, "temperature": 0.0, "n_probs": top,
            "cache_prompt": True, "logit_bias": [[token, FORCED] for token in follows],
        })  # fmt: skip
        try:
            step = answer["choices"][0]["logprobs"]["content"][0]
        except (LookupError, TypeError) as e:
            raise UserError(f"llama.cpp refused a window of {self._path}: {answer}"[:400]) from e
        assert not follows or step["id"] == follows[0], (step["id"], follows)
        likeliest = {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}
        return {**likeliest, step["id"]: step["logprob"]}


def engine_of(name: str) -> Engine | None:
    """Of ENGINES; None for transformers. UserError where it is not installed or none is known."""
    if name not in ENGINES:
        raise UserError(
            f"unknown engine '{name}'{did_you_mean(name, ENGINES)} (known: {', '.join(ENGINES)})"
        )
    return ENGINES[name]()


def url_engine(url: str, name: str | None, api_key: str | None) -> Engine:
    """An OpenAI-compatible server. name: of the model there, None for the first it has."""

    def load(wanted: Loading) -> Teller:
        from ..calib.text import load_tokenizer

        return UrlTeller(url, name, api_key, load_tokenizer(wanted.folder))

    return Engine(Computed(f"a server at {url}", TOPS[0]), load, url)


def _lowbit() -> Engine:
    def load(wanted: Loading) -> Scorer:
        from ..runtime import LLM

        if wanted.kv not in ("auto", "model"):
            raise UserError(
                f"--kv {wanted.kv} is measured by transformers' forward pass: leave --engine out"
            )
        dtype = measuring_dtype(wanted.dtype, wanted.device, wanted.folder)
        llm = LLM(wanted.folder, str(wanted.device), str(dtype).removeprefix("torch."))
        if llm.kv_cache != "as computed":
            raise UserError(
                f"{wanted.folder} quantizes its KV cache, which lowbit's logits are computed "
                "without: leave --engine out"
            )

        def scorer(ids: Tensor) -> Tensor:
            return llm.logits(ids)[0].clone()

        return scorer

    return Engine(Computed(f"lowbit {version('lowbit')}'s runtime"), load)


def _llama_cpp() -> Engine:
    if not available():
        raise UserError("--engine llama.cpp needs the package xllamacpp: pip install xllamacpp")

    def load(wanted: Loading) -> Teller:
        from ..calib.text import load_tokenizer

        contents = contents_behind(wanted.folder)
        if contents is None:
            raise UserError(
                f"llama.cpp runs GGUF files, and {wanted.folder} is none: quantize export writes it"
            )
        if wanted.kv not in ("auto", "model") or wanted.device.type != "cpu":
            raise UserError("--engine llama.cpp runs on the CPU with its own cache: no --kv")
        context = max(wanted.context, LLAMA_CPP_CONTEXT) + 1
        vocabulary = len(load_tokenizer(wanted.folder))
        return LlamaCppTeller(Path(contents.path), vocabulary, context)

    name = f"llama.cpp (xllamacpp {version('xllamacpp')})"
    return Engine(Computed(name, LLAMA_CPP_TOP), load)


ENGINES: dict[str, Callable[[], Engine | None]] = {
    "transformers": lambda: None, "lowbit": _lowbit, "llama.cpp": _llama_cpp,
}  # fmt: skip
