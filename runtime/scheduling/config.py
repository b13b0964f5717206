"""What a scheduler is made with: the pools of blocks and the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from ...kernels.errors import UserError

BLOCK_SIZE = 16  # tokens of a KV block, where nothing else is said

Policy = Literal["fcfs", "priority"]
Batching = Literal["continuous", "static"]
Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True)
class KVKind:
    """Layers that share a block table: those with the same sliding window.

    num_blocks: blocks of each of their pools that hold tokens, numbered from 1 on; block 0, which a
    pool has besides, is nobody's (see block_allocator.py). sliding_window: keys that a token sees,
    itself included; None: all. num_host_blocks: room in host memory for preempted requests. budget:
    tokens that a sequence keeps after each step, where others are let go of; None: all.
    """

    num_blocks: int
    sliding_window: int | None = None
    num_host_blocks: int = 0
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise UserError(f"a KV pool needs at least 1 block, got {self.num_blocks}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UserError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.num_host_blocks < 0:
            raise UserError(f"num_host_blocks must not be negative, got {self.num_host_blocks}")


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step, and how requests get into it.

    max_num_seqs: sequences that run at once. max_num_batched_tokens: of a step, those of prompts,
    of decodes and proposed ones together. policy: "fcfs" runs requests as they came, "priority"
    lower numbers first. batching: "static" starts a batch only when the one before is done, and
    reserves each request's longest output; it is there to be compared with. preemption: what a
    request that has to give up its blocks does with them: "recompute" them later, or "swap" them to
    host memory (recompute where that is full).
    """

    kinds: tuple[KVKind, ...]
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: Policy = "fcfs"
    batching: Batching = "continuous"
    preemption: Preemption = "recompute"
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise UserError(f"{field.name} must be at least 1, got {value}")
        for name, known in (("policy", Policy), ("batching", Batching), ("preemption", Preemption)):
            if getattr(self, name) not in get_args(known):
                raise UserError(
                    f"{name} must be one of {', '.join(get_args(known))}, got "
                    f"'{getattr(self, name)}'"
                )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence takes a token a step"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        windows = [kind.sliding_window for kind in self.kinds]
        if not windows:
            raise UserError("a scheduler needs at least one kind of KV pool, got none")
        if len(set(windows)) < len(windows):
            raise UserError(f"kinds of KV pools must differ in their windows, got {windows}")
        if self.preemption == "swap" and not all(kind.num_host_blocks for kind in self.kinds):
            raise UserError("preemption by swap needs num_host_blocks for every kind of KV pool")
