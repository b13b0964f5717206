"""The packed linear of a mixture of experts: each token goes through the weights of a few experts.

A pair is a token and one of the experts that it was sent to. The definition: the pairs of an expert
are multiplied with its weight as `linear_reference` says. Kernels sort the pairs by expert, so that
a tile of them shares a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .dispatch import Choice, choose
from .linear_ops import LinearOperands, LinearProblem, choose_linear, linear_reference


class ExpertsProblem(NamedTuple):
    """linear: of one expert. experts: how many there are."""

    linear: LinearProblem
    experts: int


@dataclass(frozen=True)
class ExpertsKernel:
    """One implementation.

    `decline(problem)`: None, or why it cannot run. `pack(operands of each expert, problem)`: the
    tensors that `run(x, tensors, expert_ids, problem)` wants; see `moe_gemm_reference` for it.
    """

    name: str
    decline: Callable[[ExpertsProblem], str | None]
    pack: Callable[[Sequence[LinearOperands], ExpertsProblem], tuple[Tensor, ...]]
    run: Callable[[Tensor, tuple[Tensor, ...], Tensor, ExpertsProblem], Tensor]


def moe_gemm_reference(
    x: Tensor, operands: Sequence[LinearOperands], expert_ids: Tensor, problem: ExpertsProblem
) -> Tensor:
    """y [tokens * top_k, out] in x's dtype, a row for each pair, those of a token together.

    expert_ids: int64 [tokens, top_k], each from 0 to experts - 1. x: [tokens, in], or [tokens *
    top_k, in] where the pairs of a token differ (the second linear of an expert).
    """
    return _by_expert(
        x, expert_ids, problem,
        lambda rows, expert: linear_reference(rows, operands[expert], None, problem.linear),
    )  # fmt: skip


def pair_rows(x: Tensor, expert_ids: Tensor) -> int:
    """How many pairs share a row of x: top_k, or 1. ValueError when x fits neither."""
    tokens, top_k = expert_ids.shape
    if len(x) not in (tokens, tokens * top_k):
        raise ValueError(
            f"moe_gemm: x has {len(x)} rows, not {tokens} (tokens) or {tokens * top_k} (pairs)"
        )
    return top_k if len(x) == tokens else 1


def _by_expert(
    x: Tensor, expert_ids: Tensor, problem: ExpertsProblem, run: Callable[[Tensor, int], Tensor]
) -> Tensor:
    shared = pair_rows(x, expert_ids)
    y = x.new_empty(expert_ids.numel(), problem.linear.out_features)
    order = expert_ids.flatten().argsort(stable=True)
    counts = expert_ids.flatten().bincount(minlength=problem.experts).tolist()
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            y[pairs] = run(x[pairs // shared], expert)
    return y


def _pack_each(operands: Sequence[LinearOperands], problem: ExpertsProblem) -> tuple[Tensor, ...]:
    """The tensors of every expert for the linear kernel that runs it, one after the other."""
    kernel = choose_linear(problem.linear).candidate
    return tuple(t for expert in operands for t in kernel.pack(expert, problem.linear))


def _run_each(
    x: Tensor, tensors: tuple[Tensor, ...], expert_ids: Tensor, problem: ExpertsProblem
) -> Tensor:
    kernel, each = choose_linear(problem.linear).candidate, len(tensors) // problem.experts
    return _by_expert(
        x, expert_ids, problem,
        lambda rows, e: kernel.run(rows, tensors[e * each : (e + 1) * each], None, problem.linear),
    )  # fmt: skip


def _decline_each(problem: ExpertsProblem) -> str | None:
    kernel = choose_linear(problem.linear).candidate
    if problem.linear.activation is not None and not kernel.quantizes_input:
        return f"its linear kernel '{kernel.name}' does not quantize inputs"
    return None


def moe_kernels() -> tuple[ExpertsKernel, ...]:
    """The dispatch table, best first."""
    from .moe_triton import GROUPED

    return GROUPED, ExpertsKernel("expert_by_expert", _decline_each, _pack_each, _run_each)


def choose_moe(problem: ExpertsProblem, force: str | None = None) -> Choice[ExpertsKernel]:
    """The kernel that runs `problem`; UserError when the one named `force` cannot."""
    return choose("moe_gemm", moe_kernels(), problem, force)
