"""What a plan says, in one typed value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..recipe import Recipe
from .advice import Advice
from .foresee import Foresight
from .modules import ModulePlan
from .parallel import UnlikePeers


@dataclass(frozen=True)
class PlanReport:
    """The dry run of a recipe on a model.

    recipe: as it would run, group sizes settled. layout: how the output would be stored. dtype: of
    the forward passes (without any: of the arithmetic). streamed: whether weights would be
    quantized one by one without building the model. modules: every linear. peers: linears that
    engines run as one although their schemes differ. tied_bytes: of an embedding that is the output
    head too, 0 where there is none. foresight: size, memory, time. notes: what was decided. advice:
    what to change where something does not fit.
    """

    model: Path
    recipe: Recipe
    layout: str
    device: str
    dtype: str
    streamed: bool
    modules: list[ModulePlan]
    peers: list[UnlikePeers]
    tied_bytes: int
    foresight: Foresight
    notes: list[str]
    advice: list[Advice]

    def devices(self) -> Mapping[int, bool]:
        """Numbers of devices -> whether every linear can be shared among them."""
        numbers = {n for m in self.modules for n in m.cuts}
        return {n: not any(m.cuts[n] for m in self.modules) for n in sorted(numbers)}
