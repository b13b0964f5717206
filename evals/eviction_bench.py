"""What it costs a model's perplexity to let go of keys and values (runtime/eviction.py).

    python -m lowbit.evals.eviction_bench MODEL --text FILE [--budgets 256,512] [--windows 2]

Each window of the text is a prompt, computed in chunks, and a rest, of which --together tokens run
in each step, whatever the model would have said: they are proposed, and all accepted. Counted is
the rest alone, exp of the mean negative log likelihood over all windows. A method lets go of tokens
after each step; with one token a step it does when it would while it generates. The method "all"
keeps everything.
"""

from __future__ import annotations

import argparse
import math
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..runtime.eviction import Method
from ..runtime.llm import LLM
from ..runtime.paged_engine import PagedEngine
from ..runtime.sampling.params import SamplingParams
from ..runtime.sampling.picker import Drawn, Picked
from ..runtime.scheduling.plan import StepPlan
from ..runtime.scheduling.scheduler import Scheduler
from ..runtime.step_results import Asked, Drawing, Live
from .report import cpu_name


class Forced:
    """In the place of an engine's StepResults: the next token of a request is the text's. nll: the
    sum over all, count: of how many."""

    def __init__(self, scheduler: Scheduler, rests: dict[str, Sequence[int]]) -> None:
        self._scheduler, self._rests = scheduler, rests
        self.nll, self.count = 0.0, 0

    def draw(self, asked: list[Asked], logits: Tensor, also: Sequence[Tensor] = ()) -> Drawing:
        """Nothing is drawn."""
        return Drawing([], Drawn(None, None, None, also))

    def advance(
        self, plan: StepPlan, asked: list[Asked], logits: Tensor, drawing: Drawing, picked: Picked,
        broken: list[Live],
    ) -> list[int]:  # fmt: skip
        if broken:
            raise UserError("the model's hidden states are not finite: take float32")
        tokens: dict[int, list[int]] = {}
        for run, live, row in asked:
            request: Any = live.request
            done, many = run.sequence.num_generated, run.num_logits
            new = list(self._rests[request.request_id][done : done + many])
            said = logits[row : row + many].double().log_softmax(-1)
            self.nll -= float(said.gather(1, torch.tensor(new)[:, None]).sum())
            self.count += many
            for token in new:
                request.continuations[0].append(token)
            tokens[id(run)] = new
        self._scheduler.update(plan, [tokens.get(id(run), []) for run in plan.runs])
        return [len(tokens.get(id(run), [])) for run in plan.runs]


def forced_perplexity(
    llm: LLM, windows: Sequence[Sequence[int]], prompt_tokens: int, together: int
) -> tuple[float, int]:
    """Perplexity of the windows' rests, and how many tokens sequences had in blocks at the end."""
    engine = llm._engine
    assert isinstance(engine, PagedEngine)
    rests: dict[str, Sequence[int]] = {}
    forced: Any = Forced(engine._scheduler, rests)
    engine._results = forced
    for window in windows:
        rest = window[prompt_tokens:]
        params = SamplingParams(max_tokens=len(rest), temperature=0, ignore_eos=True)
        request = llm._maker.request(list(window[:prompt_tokens]), params)
        rests[request.request_id] = array("i", rest)
        engine.add(request)
    held = 0
    while engine.has_work:
        for running in engine._scheduler.roster.running:
            sequence = running.sequences[0]
            done = sequence.num_generated
            if done and sequence.num_to_run == 1:
                rest = rests[running.request_id]
                engine._scheduler.propose(sequence, rest[done : done + together - 1])
                held = sum(block > 0 for block in sequence.table.blocks[0])
        engine.step()
    return math.exp(forced.nll / forced.count), held * engine._scheduler.config.block_size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(["all", *get_args(Method)]))
    parser.add_argument("--budgets", default="256,512", help="tokens kept of a sequence")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rest", type=int, default=512)
    parser.add_argument("--together", type=int, default=16, help="tokens of the rest in a step")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    methods = options.methods.split(",")
    rows: list[tuple[str | None, int | None]] = [(None, None)] if "all" in methods else []
    rows += [(m, int(b)) for b in options.budgets.split(",") for m in methods if m != "all"]
    ids: list[int] = []
    write = sys.stdout.write
    write(
        f"{options.windows} windows from the beginning of {options.text.name}, no special tokens; "
        f"prompt {options.prompt} tokens in chunks of {options.chunk}, then {options.rest}, which "
        f"are counted, {options.together} a step; {options.dtype}, torch {torch.__version__}, "
        f"{cpu_name()}\n\n"
        "| kept | budget | tokens in blocks at the end | perplexity |\n|---|---|---|---|\n"
    )
    for method, budget in rows:
        llm = LLM(
            options.model, "cpu", options.dtype, max_num_seqs=options.windows,
            max_num_batched_tokens=options.chunk, kv_eviction=method, kv_budget=budget,
        )  # fmt: skip
        assert llm.tokenizer is not None
        if not ids:
            text = options.text.read_text(encoding="utf-8")
            ids = llm.tokenizer(text[: 1 << 20], add_special_tokens=False)["input_ids"]
        size = options.prompt + options.rest
        windows = [ids[i * size : (i + 1) * size] for i in range(options.windows)]
        perplexity, most = forced_perplexity(llm, windows, options.prompt, options.together)
        write(f"| {method or 'all'} | {budget or ''} | {most} | {perplexity:.2f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
