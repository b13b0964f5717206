"""Guesses of a smaller model with the same tokenizer, over blocks of keys and values of its own.

Chen et al. 2023, arXiv:2302.01318; Leviathan et al. 2023, arXiv:2211.17192. Where a request draws,
the guesses are drawn, too, by its temperature and cuts from the smaller model's logits, with random
numbers of their own; where it is greedy they are the likeliest tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ..kv_pools import PagedKV
from ..loader import LoadedModel
from ..models.choice import decline_model, make_decoder
from ..request import Continuation
from ..sampler import draw, probabilities, sampling_batch
from ..sampling.params import GREEDY
from ..sampling.philox import as_int64, uniforms
from ..scheduling.block_manager import BlockManager
from ..scheduling.block_table import BlockTable
from ..scheduling.config import BLOCK_SIZE, KVKind
from ..scheduling.plan import add_slots
from ..step_inputs import step_inputs
from .proposer import Drafting, Proposal, Verified

CHUNK = 1024  # tokens of all continuations that run at once
PURPOSE = 1  # of its random numbers, see sampling/philox.py


class _State:
    """How far the draft model is with a continuation: the tokens whose keys are in its blocks."""

    def __init__(self, table: BlockTable) -> None:
        self.table, self.stored = table, array("i")


class _Run(NamedTuple):
    """The tokens of a continuation that run in one pass."""

    state: _State
    tokens: array[int]


class DraftModel:
    """name: of the smaller model, loaded. vocabulary: columns of the larger one's logits. most:
    tokens a proposal. max_len: of a sequence. `allocate` comes before anything is proposed.

    UserError for a model that cannot run over blocks or has another vocabulary.
    """

    def __init__(
        self, name: str, loaded: LoadedModel, tokenizer: Any, vocabulary: int, most: int,
        max_len: int,
    ) -> None:  # fmt: skip
        if reason := decline_model(loaded.model):
            raise UserError(f"the draft model '{name}' cannot run over blocks: it {reason}")
        _check_vocabulary(name, loaded, tokenizer, vocabulary)
        self.name, self.most, self._loaded, self._vocabulary = name, most, loaded, vocabulary
        config = loaded.model.config.get_text_config(decoder=True)
        self._longest = getattr(config, "max_position_embeddings", None) or max_len + most
        self._decoder = make_decoder(loaded.model, min(self._longest, max_len + most))
        self._kv = PagedKV(
            self._decoder.layers, self._decoder.kinds, None, loaded.dtype, loaded.device
        )
        self._known: dict[Continuation, _State] = {}

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self._kv.block_bytes

    def allocate(self, blocks: int) -> None:
        """Memory for so many blocks. A continuation that finds no room in it, or is longer than the
        smaller model's context, gets no proposals."""
        self._kv.allocate(blocks, 0)
        kinds = [KVKind(blocks, window) for window in self._decoder.windows]
        self._blocks = BlockManager(kinds, BLOCK_SIZE, prefix_cache=False)

    @torch.inference_mode()
    def propose(self, asked: Sequence[Drafting]) -> list[Proposal]:
        self._forget()
        going = [(i, d) for i, d in enumerate(asked) if self._begin(d)]
        proposals = [Proposal([])] * len(asked)
        if not going:
            return proposals
        drafting = [d for _, d in going]
        states = [self._known[d.continuation] for d in drafting]
        behind = [_Run(s, d.tokens[len(s.stored) :]) for s, d in zip(states, drafting, strict=True)]
        tokens, probs = self._guess(drafting, behind)
        for (i, d), own, drawn in zip(going, tokens, probs, strict=True):
            greedy = d.continuation.request.params.temperature == GREEDY
            proposals[i] = Proposal(own[: d.most], None if greedy else drawn[: d.most])
        return proposals

    def observe(self, verified: Sequence[Verified]) -> None:
        pass

    def _guess(
        self, drafting: list[Drafting], behind: list[_Run]
    ) -> tuple[list[list[int]], Tensor]:
        """For each continuation its guesses, and float64 [continuations, guesses, vocabulary] what
        they were drawn from. behind: what the draft model has yet to be told."""
        batch = sampling_batch(
            [d.continuation.request.params for d in drafting], self._loaded.device
        )
        many = max(d.most for d in drafting)
        tokens: list[list[int]] = [[] for _ in drafting]
        probs, runs = [], behind
        for step in range(many):
            logits = self._logits(runs)
            if batch.all_greedy:
                new = logits.argmax(dim=-1)
            else:
                probs.append(probabilities(logits, batch))
                drawn = draw(probs[-1], self._numbers(drafting, step).to(logits.device))
                new = torch.where(batch.temperature == GREEDY, logits.argmax(dim=-1), drawn)
            for own, token in zip(tokens, new.tolist(), strict=True):
                own.append(token)
            runs = [
                _Run(run.state, array("i", own[-1:]))
                for run, own in zip(behind, tokens, strict=True)
            ]
        return tokens, torch.stack(probs, 1) if probs else torch.empty(len(drafting), many, 0)

    def _numbers(self, drafting: list[Drafting], step: int) -> Tensor:
        each = [d.continuation for d in drafting]
        places = torch.tensor([len(c.token_ids) + step for c in each])
        streams = torch.tensor([c.index for c in each])
        return uniforms(as_int64(c.request.seed for c in each), places, streams, PURPOSE)[:, 0]

    def _begin(self, drafting: Drafting) -> bool:
        """Keep what is stored of tokens that came, and take blocks for what comes; False: there
        are none, or no positions."""
        if len(drafting.tokens) + self.most > self._longest:
            return False
        state = self._known.get(drafting.continuation)
        if state is None:
            state = self._known[drafting.continuation] = _State(self._blocks.new_table())
        tokens, stored = drafting.tokens, state.stored
        same = min(len(stored), len(tokens) - 1)
        while same and stored[:same] != tokens[:same]:
            same -= 1
        del stored[same:]
        table, end = state.table, len(tokens) + self.most
        if self._blocks.sliding:
            self._blocks.slide(table, same)
        if self._blocks.reserve(table, same, end, []) == end - same:
            return True
        self._blocks.release(table)
        del self._known[drafting.continuation]
        return False

    def _forget(self) -> None:
        """Blocks of continuations that are over are free."""
        for continuation in [c for c in self._known if c.finish_reason is not None]:
            self._blocks.release(self._known.pop(continuation).table)

    def _logits(self, runs: list[_Run]) -> Tensor:
        """[runs, vocabulary of the larger model] after the last token of each run."""
        last: list[Tensor] = []
        part: list[_Run] = []
        for run in runs:
            for begin in range(0, len(run.tokens), CHUNK):
                part.append(_Run(run.state, run.tokens[begin : begin + CHUNK]))
                whole = begin + CHUNK >= len(run.tokens)
                if not whole or sum(len(r.tokens) for r in part) >= CHUNK:
                    last += self._pass(part, keep_last=whole)
                    part = []
        last += self._pass(part, keep_last=True) if part else []
        return self._decoder.logits(torch.stack(last))[:, : self._vocabulary]

    def _pass(self, runs: list[_Run], keep_last: bool) -> list[Tensor]:
        """Hidden states after each run; without that of the last one where it is not whole."""
        starts = [len(run.state.stored) for run in runs]
        for run in runs:
            run.state.stored.extend(run.tokens)
        ends = [len(run.state.stored) for run in runs]
        places = [p for of in zip(starts, ends, strict=True) for p in range(*of)]
        tables = list(zip(*(run.state.table.blocks for run in runs), strict=True))
        slots = [array("q") for _ in tables]
        for kind, of_kind in zip(slots, tables, strict=True):
            for blocks, start, end in zip(of_kind, starts, ends, strict=True):
                add_slots(kind, blocks, start, end, BLOCK_SIZE, start)
        lens = [len(run.tokens) for run in runs]
        inputs = step_inputs(
            [t for run in runs for t in run.tokens], places, slots, lens, ends, tables,
            self._loaded.device,
        )  # fmt: skip
        at = torch.tensor(lens, device=self._loaded.device).cumsum(0) - 1
        hidden = self._decoder(inputs.token_ids, self._kv.pools, inputs.batches, inputs.new, at)
        return list(hidden if keep_last else hidden[:-1])


def _check_vocabulary(name: str, loaded: LoadedModel, tokenizer: Any, vocabulary: int) -> None:
    """UserError where a token id means something else to the two models."""
    columns = loaded.model.get_input_embeddings().weight.shape[0]
    own, other = (t.get_vocab() if t else {} for t in (loaded.tokenizer, tokenizer))
    common = own.keys() & other.keys()
    different = next((t for t in common if own[t] != other[t]), None)
    reason = None
    if columns < vocabulary:
        reason = f"{columns} columns, and the model has {vocabulary}"
    elif different is not None:
        reason = f"{different!r} is {own[different]}, and {other[different]} in the model's"
    elif 2 * len(common) < len(other):
        reason = f"{len(common)} of the model's {len(other)} tokens"
    if reason is not None:
        raise UserError(
            f"the draft model '{name}' has another vocabulary ({reason}): take one of the model's "
            "family"
        )
