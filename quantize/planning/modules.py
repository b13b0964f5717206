"""What becomes of each linear: its bytes, how its scales divide it, who can run it, how it is cut.

All from names, shapes and schemes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...calib.shards import TensorInfo
from ..linear_plan import Plan, PlannedLinear
from ..spec import Block, Channel, Group, LayerScheme, QuantSpec, TensorWise
from .parallel import SIZES, Heads, Role, cut_refusal, fused_rows, is_expert, role_of
from .runtimes import Answer, EngineLinear, llama_cpp_answer, lowbit_answer, vllm_answer
from .sizes import Sources, StoredSizes


@dataclass(frozen=True)
class ModulePlan:
    """One linear, by the name that the model gives it.

    shape: [out, in]. method, scheme: None where it stays as it is. bytes_before, bytes_after: of
    the tensors that hold its weight, scales and zero-points included (a bias is not). division: how
    scales divide the weight, in words. role: how engines cut it for several devices; cuts: number
    of devices -> why it cannot be cut for them, None where it can. lowbit, vllm: what runs it
    there, None where it stays as it is; llama_cpp: the block types that its rows fill.
    """

    name: str
    shape: tuple[int, int]
    method: str | None
    scheme: LayerScheme | None
    bytes_before: int
    bytes_after: int
    division: str
    role: Role
    cuts: Mapping[int, str | None]
    lowbit: Answer | None
    vllm: Answer | None
    llama_cpp: Answer


def module_plans(
    plan: Plan, sources: Sources, heads: Heads, dtype: torch.dtype, device: torch.device,
    taped: bool = False,
) -> list[ModulePlan]:  # fmt: skip
    """Every linear that has a weight of its own, by layer and name.

    dtype, device: those that lowbit's runtime would compute in; taped: see `runs_as_tape`.
    """
    rows = fused_rows({name: planned.shape for name, planned in plan.linears.items()})
    facts = _Facts(sources, heads, dtype, device, taped)
    made = [facts.planned(name, p, rows[name]) for name, p in plan.linears.items()]
    seen = {sources.stored_name(name) for name in plan.linears}
    for name in plan.untouched:
        info = sources.info.get(f"{name}.weight")
        if info is not None and len(info.shape) == 2 and name not in seen:
            made.append(facts.untouched(name, info))
    return sorted(made, key=lambda m: _numbered(m.name))


def _numbered(name: str) -> list[tuple[bool, int, str]]:
    """A key by which names sort with their numbers as numbers."""
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")]


def division_of(spec: QuantSpec, shape: tuple[int, int]) -> str:
    """How scales divide a weight [out, in], in words: "9 groups of 64 columns"."""
    rows, columns = shape
    match spec.granularity:
        case Group(size):
            return f"{columns // size} groups of {size} columns"
        case Channel():
            return "one scale a row"
        case TensorWise():
            return "one scale"
        case Block(tall, wide):
            high, across = -(-rows // tall), -(-columns // wide)
            cut = ", the last ones cut" if rows % tall or columns % wide else ""
            return f"{high} x {across} blocks of {tall} x {wide}{cut}"
    return str(spec.granularity)


class _Facts:
    """Makes ModulePlans; what depends on shape and scheme alone is worked out once."""

    def __init__(
        self, sources: Sources, heads: Heads, dtype: torch.dtype, device: torch.device, taped: bool
    ) -> None:
        self._sources, self._heads = sources, heads
        self._sizes = StoredSizes(sources.layout)
        self._vllm = functools.cache(vllm_answer)
        self._lowbit = functools.cache(
            lambda scheme, shape: lowbit_answer("it", scheme, shape, dtype, device, taped)
        )

    def planned(self, name: str, planned: PlannedLinear, fused: int) -> ModulePlan:
        """fused: output rows of the linear that engines run it in."""
        scheme, shape, role = planned.scheme, planned.shape, role_of(name)
        info = self._sources.info[f"{self._sources.stored_name(name)}.weight"]
        engine = EngineLinear(shape[1], fused, scheme, role, is_expert(name))
        return ModulePlan(
            name, shape, planned.taken_by.method, scheme, info.nbytes,
            self._sizes.of(scheme, shape, info.dtype).total, division_of(scheme.weights, shape),
            role, self._cuts(name, shape, scheme), self._lowbit(scheme, shape),
            self._vllm(engine), llama_cpp_answer(shape),
        )  # fmt: skip

    def untouched(self, name: str, info: TensorInfo) -> ModulePlan:
        shape = (info.shape[0], info.shape[1])
        return ModulePlan(
            name, shape, None, None, info.nbytes, info.nbytes, "as it is", role_of(name),
            self._cuts(name, shape, None), None, None, llama_cpp_answer(shape),
        )  # fmt: skip

    def _cuts(
        self, name: str, shape: tuple[int, int], scheme: LayerScheme | None
    ) -> dict[int, str | None]:
        return {n: cut_refusal(name, shape, scheme, self._heads, n) for n in SIZES}
