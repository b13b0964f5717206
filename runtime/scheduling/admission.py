"""Whether a request can run at all, and whether now: counts of blocks, without taking any."""

from __future__ import annotations

from collections.abc import Iterable

from ...kernels.errors import UserError, counted
from .block_manager import BlockManager
from .config import SchedulerConfig
from .host_blocks import HostBlocks
from .sequence import RequestState, Sequence

HEADROOM = (
    0.01  # of the blocks: left to those that run, so that a newcomer is not preempted at once
)


class Admission:
    """Counts for the scheduler, which asks for one request at a time, the first that waits.

    `open_step` once a step, then `fits` as often as it is true, and once more.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, host: HostBlocks) -> None:
        self.config, self.blocks, self.host = config, blocks, host
        self._promised = [0] * len(config.kinds)
        self._waiting: RequestState | None = None
        self._needed: list[int] = []

    def check(self, request: RequestState) -> None:
        """UserError where `request` could not run to its end if it were alone."""
        name, config = f"request {request.request_id}", self.config
        if request.n > config.max_num_seqs:
            raise UserError(
                f"{name} asks for {request.n} continuations, and max_num_seqs is "
                f"{config.max_num_seqs}: ask for fewer"
            )
        for kind, needed in enumerate(self.most_blocks(request)):
            there = config.kinds[kind].num_blocks
            if needed > there:
                window = config.kinds[kind].sliding_window
                layers = "" if window is None else f" in layers with a window of {window}"
                continuations = f" x {request.n}" if request.n > 1 else ""
                raise UserError(
                    f"{name} can never fit: its prompt of {request.num_prompt_tokens} and up to "
                    f"{counted(request.max_tokens, 'new token')}{continuations} need "
                    f"{counted(needed, 'KV block')} of {counted(config.block_size, 'token')}"
                    f"{layers}, and there are {there}; shorten it or give the KV cache more memory"
                )

    def most_blocks(self, request: RequestState, chunk: int = 1) -> list[int]:
        """Of each kind, the blocks with which `request` runs to its end, its prompt in chunks.

        Continuations share the full blocks of their prompt, which after a preemption only the
        prefix cache makes sure of.
        """
        shared = 0
        if request.n > 1 and self.blocks.prefix is not None and request.reuse_prefix:
            shared = request.num_prompt_tokens // self.config.block_size
        needed = []
        for kind, settings in enumerate(self.config.kinds):
            peak = self.blocks.peak_blocks(kind, request.max_stored, chunk)
            common = 0 if settings.sliding_window or settings.budget else shared
            needed.append(common + request.n * (peak - common))
        return needed

    def open_step(self, running: Iterable[RequestState]) -> None:
        """Count what the running requests will still take for the tokens that they have."""
        static = self.config.batching == "static"
        self._promised = [0] * len(self.config.kinds)
        for request in running:
            if static:
                self._promise(self.most_blocks(request, self.config.max_num_batched_tokens))
                continue
            for sequence in request.sequences:
                if len(sequence.tokens) - sequence.num_computed > 1:
                    self._promise(self._to_come(sequence))

    def fits(self, request: RequestState, alone: bool) -> bool:
        """Whether there are blocks for all that `request` has to compute before its next token, or
        for its longest output in a static batch. alone: nothing runs, so there are."""
        if any(s.num_pending for s in request.sequences):
            return False  # preempted while its sample is in flight
        if self._waiting is not request:
            self._waiting, self._needed = request, self._count(request)
        if not alone and not self._has_room():
            return False
        if self.config.batching == "static":
            self._promise(self._needed)
        self._waiting = None
        return True

    def _has_room(self) -> bool:
        static = self.config.batching == "static"
        for kind, allocator in enumerate(self.blocks.allocators):
            total = allocator.num_blocks
            there = total if static else allocator.available - int(total * HEADROOM)
            if self._needed[kind] > there - self._promised[kind]:
                return False
        return True

    def _promise(self, blocks: list[int]) -> None:
        self._promised = [a + b for a, b in zip(self._promised, blocks, strict=True)]

    def _count(self, request: RequestState) -> list[int]:
        if self.config.batching == "static":
            return self.most_blocks(request, self.config.max_num_batched_tokens)
        live, kinds = request.live, range(len(self.config.kinds))
        if any(s.host_blocks is not None for s in live):
            return [self.host.held_by(request, kind) + len(live) for kind in kinds]
        needed = [0] * len(kinds)
        for sequence in live:
            needed = [a + b for a, b in zip(needed, self._to_start(sequence), strict=True)]
        return needed

    def _to_start(self, sequence: Sequence) -> list[int]:
        """Blocks that are now available and will not be when all its tokens are computed."""
        tokens, chunk = sequence.tokens, self.config.max_num_batched_tokens
        kinds = range(len(self.config.kinds))
        needed = [self.blocks.peak_blocks(kind, len(tokens), chunk) for kind in kinds]
        if not sequence.request.reuse_prefix:
            return needed
        path = self.blocks.find(sequence.table, tokens, len(tokens))
        for kind, allocator in enumerate(self.blocks.allocators):
            if self.config.kinds[kind].sliding_window is None:
                there = sum(allocator.refs[node.blocks[kind]] > 0 for node in path)
                needed[kind] = max(0, needed[kind] - there)
        return needed

    def _to_come(self, sequence: Sequence) -> list[int]:
        """Blocks that a sequence that runs will take for the tokens that it has."""
        tokens, chunk = len(sequence.tokens), self.config.max_num_batched_tokens
        table = sequence.table
        return [
            max(0, self.blocks.peak_blocks(kind, tokens, chunk) - len(blocks) + passed + evicted)
            for kind, (blocks, passed, evicted) in enumerate(
                zip(table.blocks, table.passed, table.evicted, strict=True)
            )
        ]
