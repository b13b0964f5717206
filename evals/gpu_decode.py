"""Decode steps on a GPU, replayed as CUDA graphs against launched one by one.

Times here are of the wall, from the numbers of a plan to logits that are there: what Python takes
to launch a step is what graphs are for. Logits are compared first. Then a whole engine: the same
tokens with graphs, with steps planned ahead, with both and with neither, and no step that waits for
the device but for its tokens.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ..runtime.cuda_recorder import CudaRecorder
from ..runtime.graphs import DecodeGraphs, DecodeNumbers, Recorder
from ..runtime.kv_pools import PagedKV
from ..runtime.llm import LLM
from ..runtime.models.decoder import Decoder
from ..runtime.paged_engine import PagedEngine
from ..runtime.sampling.params import SamplingParams
from ..runtime.scheduling.config import BLOCK_SIZE
from ..runtime.step_inputs import step_inputs
from .gpu_speed import Speed, each
from .tiny_llama import SENTENCE, tiny_llama

LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
TOLERANCE = 0.02  # of logits in bfloat16: a padded batch may go by another algorithm
REPEATS, STEPS_BEFORE = 15, 4


def llama_1b_steps(size: int, context: int) -> DecodeSteps:
    """Steps of Llama 3.2 1B's shape on a GPU, in bfloat16."""
    device = torch.device("cuda")
    config = LlamaConfig(**LLAMA_1B, max_position_embeddings=context)
    return DecodeSteps(config, size, context, device, torch.bfloat16, CudaRecorder(device))


class DecodeSteps:
    """Steps of a random model of `config`, `size` sequences of `context` keys at most, with and
    without graphs."""

    def __init__(
        self, config: LlamaConfig, size: int, context: int, device: torch.device,
        dtype: torch.dtype, recorder: Recorder,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._context, self._device, self._vocabulary = context, device, config.vocab_size
        self._blocks = -(-context // BLOCK_SIZE)
        self._decoder = Decoder(model, context)
        self._kv = PagedKV(self._decoder.layers, self._decoder.kinds, None, dtype, device)
        self._kv.allocate(size * self._blocks, 0)
        for pool in itertools.chain.from_iterable(self._kv.pools):
            pool.codes.normal_()
        self._weights = sum(p.nbytes for p in model.parameters())
        self.graphs = DecodeGraphs(self._decoder, self._kv.pools, size, context, device, recorder)
        self.graphs.capture(use_tqdm=False)

    def speed(self, what: str, size: int) -> Speed:
        """Of `size` sequences. RuntimeError where logits differ, or there is no graph."""
        numbers = self._numbers(size)
        want, got = self._eager(numbers).float(), self._replayed(numbers).float()
        error = float((got - want).norm() / want.norm())
        if not error < TOLERANCE:
            raise RuntimeError(
                f"replayed logits differ by {error:.1e} from those of single launches"
            )
        kept = sum(pool.nbytes for pools in self._kv.pools for pool in pools)
        moved = self._weights + kept * size * self._blocks // (len(self._kv.pools[0].keys.codes))
        ours = self._seconds(lambda: self._replayed(numbers))
        theirs = self._seconds(lambda: self._eager(numbers))
        return Speed(what, size, "cuda graph", ours, theirs, moved, size * self._weights, bar=1.0)

    def _numbers(self, size: int) -> DecodeNumbers:
        tables = [
            range(1 + i * self._blocks, 1 + (i + 1) * self._blocks) for i in range(size)
        ]  # block 0 is nobody's
        at = self._context - 1
        slots = [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table in tables]
        ids = [i % self._vocabulary for i in range(size)]
        return DecodeNumbers(ids, [at] * size, [slots], [self._context] * size, [tables])

    @torch.inference_mode()
    def _eager(self, numbers: DecodeNumbers) -> Tensor:
        ids, positions, slots, lengths, tables = numbers
        step = step_inputs(ids, positions, slots, [1] * len(ids), lengths, tables, self._device)
        hidden = self._decoder(step.token_ids, self._kv.pools, step.batches, step.new)
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def _replayed(self, numbers: DecodeNumbers) -> Tensor:
        form = self.graphs.form(len(numbers.token_ids), self._context)
        if form is None:
            raise RuntimeError(self.graphs.describe())
        return self.graphs.logits(form, numbers)

    def _seconds(self, step: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])


def engine_speeds(device: str) -> Iterator[Speed]:
    """Seconds for a token of an engine, against one without graphs whose steps wait."""
    with tempfile.TemporaryDirectory() as made:
        folder = tiny_llama(Path(made))
        plain_tokens, plain = _generated(folder, device)

        def measure(options: tuple[bool, bool]) -> Speed:
            graphs, ahead = options
            tokens, seconds = _generated(folder, device, cuda_graphs=graphs, async_scheduling=ahead)
            what = " and ".join(["graphs"] * graphs + ["planned ahead"] * ahead)
            if tokens != plain_tokens:
                raise RuntimeError("the tokens are not those without it")
            return Speed(f"engine, {what}", 8, "paged engine", seconds, plain, 0, 0)

        yield from each([(True, False), (False, True), (True, True)], measure)


def _generated(folder: Path, device: str, **options: bool) -> tuple[list[Any], float]:
    """The tokens of a few requests, and seconds for each. RuntimeError where a step waits for the
    device otherwise than for its tokens."""
    given = {"cuda_graphs": False, "async_scheduling": False, **options}
    llm = LLM(folder, device, "float32", max_num_seqs=8, **given)  # type: ignore[arg-type]
    if given["cuda_graphs"] and device == "cuda" and "no CUDA graphs" in llm.decode_graphs:
        raise RuntimeError(llm.decode_graphs)
    engine = llm._engine
    assert isinstance(engine, PagedEngine)
    params = SamplingParams(max_tokens=100, temperature=0.7, seed=1, top_p=0.9, ignore_eos=True)
    requests = llm._maker.requests([SENTENCE[: 5 + 9 * i] for i in range(8)], params)
    for request in requests:
        engine.add(request)
    for _ in range(STEPS_BEFORE):
        engine.step()
    before = llm.metrics().output_tokens
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - started
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    tokens = [request.continuations[0].token_ids for request in requests]
    return tokens, seconds / (llm.metrics().output_tokens - before)
