"""The face of the runtime: a model folder in, text out, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..kernels.errors import UserError
from ..quantize.kv_names import describe_kv
from .engine import Engine, EngineStats
from .eviction import Eviction
from .kv_formats import resolve_kv
from .kv_pools import kv_memory_within
from .linear import LinearReport
from .loader import load
from .metrics import EngineMetrics
from .paged_engine import EngineLimits, PagedEngine, decline_engine
from .prompts import (
    Messages,
    Prompt,
    Prompts,
    RequestMaker,
    as_conversations,
    as_prompts,
    is_message,
)
from .request import Request, RequestFailed, RequestOutput, SamplingParams
from .sampling.beams import BeamRequest, BeamSearchOutput
from .sampling.params import BeamSearchParams
from .scheduling.config import Batching, Policy
from .speculation.speculator import make_proposer

ENGINES = ("auto", "paged", "contiguous")


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
    quarter of the free memory, or less where that is enough for all rows), or in its place
    gpu_memory_utilization: the share of a GPU's memory that is in use with them;
    enable_prefix_caching: compute what prompts have in common once; batching: "static" lets nobody
    join a batch that runs, to be compared with "continuous"; speculate: "ngram", "lookahead" or the
    folder of a smaller model, which propose num_speculative_tokens that the model verifies in one
    step (runtime/speculation); swap_memory: bytes of host memory to which requests move what they
    have computed when blocks run out (0: it is computed again); kv_eviction: "window", "h2o" or
    "snapkv" (runtime/eviction.py) keep kv_budget tokens of each sequence, without a prefix cache;
    batch_invariant: a request's logits have the same bits whatever runs beside it, however its
    prompt is cut and whatever is proposed (runtime/invariance.py), which takes longer;
    scheduling_policy: "fcfs" runs requests as they came, "priority" those of lower numbers first,
    which may take the place of running ones. On a GPU, cuda_graphs: decode steps are replayed
    (runtime/graphs.py), which takes memory besides and some seconds at the start; async_scheduling:
    a step is planned while the one before runs (runtime/flight.py), so that what comes of it is
    told a step later. head_bits: 8 rounds the output head to whole numbers, which a step of a small
    model reads faster (runtime/head.py; None: as it is stored).

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
        batching: Batching = "continuous",
        speculate: str | None = None,
        num_speculative_tokens: int | None = None,
        swap_memory: int = 0,
        kv_eviction: str | None = None,
        kv_budget: int | None = None,
        batch_invariant: bool = False,
        scheduling_policy: Policy = "fcfs",
        gpu_memory_utilization: float | None = None,
        cuda_graphs: bool = True,
        async_scheduling: bool = True,
        head_bits: int | None = None,
    ) -> None:
        if engine not in ENGINES:
            raise UserError(f"engine must be one of {', '.join(ENGINES)}, got '{engine}'")
        eviction = Eviction.of(kv_eviction, kv_budget)
        _check_together(
            {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
            evicts=eviction is not None,
            speculates=speculate is not None,
            invariant=batch_invariant,
        )
        if kv_memory is not None and gpu_memory_utilization is not None:
            raise UserError("kv_memory and gpu_memory_utilization say the same: give one of them")
        loaded = load(path, device, dtype, linear_kernel, batch_invariant, head_bits)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.device, self.dtype = loaded.device, loaded.dtype
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]
        self.max_model_len = _context_length(self.model.config, max_model_len)
        self.max_num_seqs, self.scheduling_policy = max_num_seqs, scheduling_policy
        self._linears, self.warnings = loaded.linears, loaded.warnings
        self._maker = RequestMaker(loaded, self.vocab_size, self.max_model_len)
        kv = resolve_kv(kv_cache_dtype, loaded.kv, self.model.config)
        declined = decline_engine(loaded, kv)
        if engine == "paged" and declined:
            raise UserError(f"the paged engine {declined}; take engine='contiguous'")
        self.engine = "contiguous" if engine == "contiguous" or declined else "paged"
        self.engine_declined = declined
        if self.engine == "paged":
            proposer = None if speculate is None else make_proposer(
                speculate, num_speculative_tokens, loaded, self.vocab_size, self.max_model_len
            )  # fmt: skip
            on_gpu = self.device.type == "cuda"
            if gpu_memory_utilization is not None:
                kv_memory = kv_memory_within(gpu_memory_utilization, self.device)
            limits = EngineLimits(
                max_num_seqs, max_num_batched_tokens, self.max_model_len, kv_memory,
                enable_prefix_caching, batching, proposer, swap_memory, eviction,
                scheduling_policy, cuda_graphs, async_scheduling and on_gpu,
            )  # fmt: skip
            self._engine: Engine | PagedEngine = PagedEngine(loaded, limits, kv)
            if on_gpu and cuda_graphs and (why := self._engine.graphs_declined) is not None:
                self.warnings = [*self.warnings, f"decode runs without CUDA graphs: {why}"]
        else:
            asked = {
                "speculate": speculate, "kv_eviction": kv_eviction, "swap_memory": swap_memory,
                "batch_invariant": batch_invariant,
                "scheduling_policy": scheduling_policy != "fcfs",
                "gpu_memory_utilization": gpu_memory_utilization,
            }  # fmt: skip
            if names := [name for name, value in asked.items() if value]:
                raise UserError(
                    f"{' and '.join(names)} need{'s' * (len(names) == 1)} the paged engine; it "
                    f"{declined or 'was not chosen'}"
                )
            self._engine = Engine(loaded, max_num_seqs, kv)

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds of prefill and decode since the model was loaded."""
        return self._engine.stats

    def metrics(self) -> EngineMetrics:
        """What the engine is doing and has done."""
        return self._engine.metrics()

    @property
    def capacity(self) -> int:
        """Tokens that a prompt and one output can have: the model's context, or what the KV cache
        has room for."""
        return min(self.max_model_len, getattr(self._engine, "capacity", self.max_model_len))

    @property
    def kv_cache(self) -> str:
        """How keys and values are stored, in words."""
        return describe_kv(self._engine.kv.spec) if self._engine.kv else "as computed"

    @property
    def decode_graphs(self) -> str:
        """How decode steps are launched, in words."""
        return getattr(self._engine, "decode_graphs", "no CUDA graphs: the engine has none")

    def linear_report(self) -> list[LinearReport]:
        """For every packed linear: its kernel, and why those before it in the table declined."""
        return list(self._linears)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue `prompts`; the outputs come in their order.

        A prompt is a string, a list of token ids or {"prompt_token_ids": ids}. sampling_params: one
        for all prompts or one for each. use_tqdm: a progress bar on standard error after 2 seconds.
        priority: of each prompt, see scheduling_policy. RequestFailed, when all have ended, where
        the model gave one of them no finite logits.
        """
        requests = self._maker.requests(as_prompts(prompts), sampling_params)
        if priority is not None:
            if len(priority) != len(requests):
                raise UserError(
                    f"{len(requests)} prompts need as many priorities, got {len(priority)}"
                )
            for request, number in zip(requests, priority, strict=True):
                request.priority = number
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], or a list of them."""
        prompts = [self._maker.chat_prompt(m) for m in as_conversations(messages)]
        return self._run(self._maker.requests(prompts, sampling_params), use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Iterator[str | RequestOutput]:
        """Pieces of text as they come, then the RequestOutput, whose text is their sum.

        `prompt` may be a conversation too. Left before its end, it frees what it holds.
        """
        chat = isinstance(prompt, Sequence) and len(prompt) > 0 and is_message(prompt[0])
        prompts: list[Any] = [self._maker.chat_prompt(prompt)] if chat else as_prompts(prompt)
        requests = self._maker.requests(prompts, sampling_params)
        if len(requests) != 1:
            raise UserError(f"stream takes one prompt, got {len(requests)}")
        if len(requests[0].continuations) != 1:
            raise UserError(
                f"stream takes n = 1, got {len(requests[0].continuations)}: AsyncEngine streams "
                "several continuations"
            )
        text = requests[0].continuations[0].text
        for _ in self._steps(requests):
            if piece := text.new_text():
                yield piece
        yield _outputs(requests)[0]

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a search over beams finds."""
        if self.engine != "paged":
            raise UserError(
                "beam search needs the paged engine, which shares what beams have in common; it "
                f"{self.engine_declined or 'was not chosen'}"
            )
        requests = [self._maker.beams(p, params) for p in as_prompts(prompts)]
        with tqdm(total=len(requests), desc="beams", delay=2, disable=not use_tqdm) as bar:
            for stepped in self._steps(requests):
                bar.update(sum(r.finished for r in stepped))
        if error := next((r.error for r in requests if r.error), None):
            raise UserError(error)
        return [r.output() for r in requests]

    @torch.inference_mode()
    def logits(self, token_ids: Tensor) -> Tensor:
        """Logits [rows, n, vocabulary] of token rows int64 [rows, n], without a cache."""
        return self.model(input_ids=token_ids.to(self.device), use_cache=False).logits

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        total = sum(r.max_tokens * len(r.continuations) for r in requests)
        with tqdm(total=total, desc="generate", unit="tok", delay=2, disable=not use_tqdm) as bar:
            for stepped in self._steps(requests):
                bar.update(len(stepped))
        return _outputs(requests)

    def _steps(self, requests: Sequence[Request | BeamRequest]) -> Iterator[list[Any]]:
        """Run `requests` to their end; after each step, those that something has come of. What is
        not over when this is left is aborted."""
        going = set(requests)
        try:
            for request in requests:
                self._engine.add(request)  # type: ignore[arg-type]  # beams to the paged one alone
            while going:
                assert self._engine.has_work, f"{len(going)} requests are lost"
                stepped = self._engine.step()
                going.difference_update([r for r in stepped if r.finished])
                yield stepped
        finally:
            for request in going:
                self._engine.abort(request.request_id)


def _check_together(
    counts: dict[str, int], *, evicts: bool, speculates: bool, invariant: bool
) -> None:
    """UserError for counts below 1, and for choices that exclude each other."""
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if evicts and speculates:
        raise UserError(
            "kv_eviction does not go with speculate: tokens that are verified in one step would "
            "see other keys than one by one; choose one of them"
        )
    if evicts and invariant:
        raise UserError(
            "kv_eviction does not go with batch_invariant: what is kept follows from how steps are "
            "cut; choose one of them"
        )


def _outputs(requests: list[Request]) -> list[RequestOutput]:
    outputs = [r.output() for r in requests]
    if error := next((r.error for r in requests if r.error), None):
        raise RequestFailed(error, outputs)
    return outputs


def _context_length(config: Any, asked: int | None) -> int:
    """The longest sequence: the model's, or a smaller one that was asked for."""
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if asked is None:
        return own if own is not None else 1 << 30
    if asked < 2 or (own is not None and asked > own):
        raise UserError(f"max_model_len must be from 2 to the model's {own}, got {asked}")
    return asked
