"""The face of the runtime: a model folder in, text out, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from ..kernels.errors import UserError
from ..quantize.kv_names import describe_kv
from .engine import Engine, EngineStats
from .kv_formats import resolve_kv
from .linear import LinearReport
from .loader import load
from .paged_engine import EngineLimits, PagedEngine, decline_engine
from .request import Request, RequestOutput, SamplingParams

ENGINES = ("auto", "paged", "contiguous")
Prompt: TypeAlias = "str | Sequence[int] | dict[str, Any]"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"
Messages: TypeAlias = "Sequence[dict[str, str]]"


class LLM:
    """A model ready to generate. engine: which one runs it; engine_declined: why not the paged one.

    path: an original Hugging Face folder or a compressed-tensors checkpoint. device, dtype: see
    runtime/placement.py for what "auto" means. max_num_seqs: requests that decode together.
    max_model_len: the longest prompt with its output (the model's own limit when None).
    linear_kernel: run all packed linears on the kernel of this name. kv_cache_dtype: a format of
    the KV cache by name (quantize/kv_names.py), "model" for the model's dtype, "auto" for what the
    checkpoint says, else the model's. engine: "paged" (runtime/paged_engine.py: continuous
    batching) or "contiguous" (runtime/engine.py); "auto": the first that can run the model. Of the
    paged one, max_num_batched_tokens: of a step; kv_memory: bytes for keys and values (None: a
    quarter of the free memory, or less where that is enough for all rows); enable_prefix_caching:
    compute what prompts have in common once.

    Raises UserError for folders that are no causal LM, damaged checkpoints, and choices that cannot
    run on this machine.
    """

    def __init__(
        self,
        path: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        linear_kernel: str | None = None,
        kv_cache_dtype: str = "auto",
        engine: str = "auto",
        max_num_batched_tokens: int = 2048,
        kv_memory: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        if engine not in ENGINES:
            raise UserError(f"engine must be one of {', '.join(ENGINES)}, got '{engine}'")
        for name, value in (
            ("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)
        ):  # fmt: skip
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        loaded = load(path, device, dtype, linear_kernel)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.device, self.dtype = loaded.device, loaded.dtype
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]
        self.max_model_len = _context_length(self.model.config, max_model_len)
        self._linears, self.warnings = loaded.linears, loaded.warnings
        self._eos_token_ids = loaded.eos_token_ids
        kv = resolve_kv(kv_cache_dtype, loaded.kv, self.model.config)
        declined = decline_engine(loaded, kv)
        if engine == "paged" and declined:
            raise UserError(f"the paged engine {declined}; take engine='contiguous'")
        self.engine = "contiguous" if engine == "contiguous" or declined else "paged"
        self.engine_declined = declined
        if self.engine == "paged":
            limits = EngineLimits(
                max_num_seqs, max_num_batched_tokens, self.max_model_len, kv_memory,
                enable_prefix_caching,
            )  # fmt: skip
            self._engine: Engine | PagedEngine = PagedEngine(loaded, limits, kv)
        else:
            self._engine = Engine(loaded, max_num_seqs, kv)

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds of prefill and decode since the model was loaded."""
        return self._engine.stats

    @property
    def kv_cache(self) -> str:
        """How keys and values are stored, in words."""
        return describe_kv(self._engine.kv.spec) if self._engine.kv else "as computed"

    def linear_report(self) -> list[LinearReport]:
        """For every packed linear: its kernel, and why those before it in the table declined."""
        return list(self._linears)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue `prompts`; the outputs come in their order.

        A prompt is a string, a list of token ids or {"prompt_token_ids": ids}. sampling_params: one
        for all prompts or one for each. use_tqdm: a progress bar on standard error after 2 seconds.
        """
        return self._run(self._requests(_as_list(prompts), sampling_params), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], or a list of them."""
        prompts = [self._chat_prompt(m) for m in _as_conversations(messages)]
        return self._run(self._requests(prompts, sampling_params), use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Iterator[str | RequestOutput]:
        """Pieces of text as they come, then the RequestOutput, whose text is their sum.

        `prompt` may be a conversation too.
        """
        chat = isinstance(prompt, Sequence) and len(prompt) > 0 and _is_message(prompt[0])
        prompts: list[Any] = [self._chat_prompt(prompt)] if chat else _as_list(prompt)
        requests = self._requests(prompts, sampling_params)
        if len(requests) != 1:
            raise UserError(f"stream takes one prompt, got {len(requests)}")
        for _ in self._engine.run(requests):
            if piece := requests[0].text.new_text():
                yield piece
        yield requests[0].output()

    @torch.inference_mode()
    def logits(self, token_ids: Tensor) -> Tensor:
        """Logits [rows, n, vocabulary] of token rows int64 [rows, n], without a cache."""
        return self.model(input_ids=token_ids.to(self.device), use_cache=False).logits

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        total = sum(r.max_tokens for r in requests)
        with tqdm(total=total, desc="generate", unit="tok", delay=2, disable=not use_tqdm) as bar:
            for stepped in self._engine.run(requests):
                bar.update(len(stepped))
        return [r.output() for r in requests]

    def _requests(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts need as many sampling_params or one for all, got "
                f"{len(sampling_params)}"
            )
        return [self._request(p, s) for p, s in zip(prompts, sampling_params, strict=True)]

    def _request(self, prompt: Any, params: SamplingParams) -> Request:
        text, token_ids = self._tokenize(prompt)
        if not token_ids:
            raise UserError("the prompt is empty: it must have at least one token")
        outside = [t for t in token_ids if not 0 <= t < self.vocab_size]
        if outside:
            raise UserError(
                f"token id {outside[0]} is out of the vocabulary: ids go from 0 to "
                f"{self.vocab_size - 1}"
            )
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise UserError(
                f"the prompt has {len(token_ids)} tokens, but prompt and output together may have "
                f"{self.max_model_len}: shorten it"
            )
        if params.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and the model folder has none")
        return Request(
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=min(params.max_tokens, room),
            eos_token_ids=self._eos_token_ids,
            tokenizer=self.tokenizer,
        )

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if not ({"prompt", "prompt_token_ids"} & prompt.keys()):
                raise UserError(
                    "a prompt given as a dict needs 'prompt' or 'prompt_token_ids', got "
                    f"{sorted(prompt)}"
                )
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids")
            return (text, list(ids)) if ids is not None else self._tokenize(text)
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise UserError("the model folder has no tokenizer: give the prompt as token ids")
        return prompt, list(self.tokenizer(prompt)["input_ids"])

    def _chat_prompt(self, messages: Any) -> dict[str, Any]:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise UserError("the model has no chat template: use generate with a plain prompt")
        if not messages:
            raise UserError("the conversation is empty: it must have at least one message")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"prompt": text, "prompt_token_ids": ids}


def _context_length(config: Any, asked: int | None) -> int:
    """The longest sequence: the model's, or a smaller one that was asked for."""
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if asked is None:
        return own if own is not None else 1 << 30
    if asked < 2 or (own is not None and asked > own):
        raise UserError(f"max_model_len must be from 2 to the model's {own}, got {asked}")
    return asked


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    prompts = list(prompts)
    if not prompts:
        raise UserError("no prompt was given")
    if all(isinstance(p, int) for p in prompts):
        return [prompts]
    wrong = [p for p in prompts if not isinstance(p, str | dict | Sequence)]
    if wrong:
        raise UserError(
            "a prompt must be a string, a list of token ids or a dict, got "
            f"{type(wrong[0]).__name__}"
        )
    return prompts


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def _as_conversations(messages: Any) -> list[Any]:
    messages = list(messages)
    return [messages] if not messages or _is_message(messages[0]) else messages
