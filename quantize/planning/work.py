"""How much a run has to do, counted from shapes: what times a machine's rates gives seconds.

Linears that share an input are one `Problem`: they share statistics and are quantized at once. Most
problems of a model are alike but for the layer, so each is listed once with a count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..linear_names import fused_peers
from ..linear_plan import Plan
from ..recipe import Recipe
from ..recipe_passes import WeightPass
from ..spec import LayerScheme
from .parallel import is_expert


class Problem(NamedTuple):
    """Linears that share an input of `columns` and have `rows` outputs together, `count` times in
    the model. share: of all tokens, those that reach it (an expert sees some)."""

    columns: int
    rows: int
    taken_by: WeightPass
    scheme: LayerScheme
    share: float
    count: int

    @property
    def weights(self) -> int:
        return self.columns * self.rows

    @property
    def kind(self) -> Problem:
        """What decides how long it takes to solve."""
        return self._replace(share=1.0, count=1)


@dataclass(frozen=True)
class Work:
    """What a run does.

    problems: all that is quantized. recipe: as it will run. rows: calibration rows, 0 without any.
    kinds: a layer of each kind -> how many there are; None where no model is built. restored: of
    each kind, those that are finished already and are run through once. layer_weights:
    numbers in all decoder layers. hidden, vocabulary: sizes of the model, 0 where unknown.
    bytes_before, bytes_after: of all tensors; quantized_bytes: of those that are made anew.
    streamed: weights are quantized without a model. head: columns and rows of an output head that
    is quantized.
    """

    problems: tuple[Problem, ...]
    recipe: Recipe
    rows: int
    seq_len: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    restored: Mapping[str, int] = field(default_factory=dict)
    layer_weights: int = 0
    hidden: int = 0
    vocabulary: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    quantized_bytes: int = 0
    streamed: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    @property
    def layers(self) -> int:
        return sum(self.kinds.values())


def problems_of(plan: Plan, config: Mapping[str, Any], all_experts: bool) -> tuple[Problem, ...]:
    """The plan's linears by the input that they share.

    Which linears share one is told by their names (q/k/v, gate/up, w1/w3); a run finds it out by
    running the model.
    """
    share = 1.0 if all_experts else expert_share(config)
    counts: dict[Problem, int] = {}
    for peers in fused_peers(list(plan.linears)):
        together: dict[tuple[int, LayerScheme, int], list[str]] = {}
        for name in peers:
            planned = plan.linears[name]
            key = id(planned.taken_by), planned.scheme, planned.shape[1]
            together.setdefault(key, []).append(name)
        for names in together.values():
            first = plan.linears[names[0]]
            problem = Problem(
                first.shape[1], sum(plan.linears[n].shape[0] for n in names), first.taken_by,
                first.scheme, share if is_expert(names[0]) else 1.0, 0,
            )  # fmt: skip
            counts[problem] = counts.get(problem, 0) + 1
    return tuple(problem._replace(count=count) for problem, count in counts.items())


def expert_share(config: Mapping[str, Any]) -> float:
    """The share of the tokens that an expert sees on average; 1 for models without experts."""
    text = config.get("text_config") or config
    chosen = text.get("num_experts_per_tok") or text.get("top_k")
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((text[key] for key in keys if text.get(key)), None)
    return min(1.0, chosen / experts) if chosen and experts else 1.0


def layer_passes(recipe: Recipe) -> float:
    """How often every calibration row goes through every layer."""
    smoothing = [t for t in recipe.transforms if t.method != "rotate"]
    passes = float(len(smoothing))  # each observes the layer
    whole = any(p.method == "signround" for p in recipe.weight_passes)
    if whole:
        return passes + 3  # observed, run as the float model, run as it is stored
    passes += 1 if recipe.execution.order == "sequential" else 2
    if "input_shift" in recipe.needs:
        passes += 2  # the float model beside, twice
    return passes


def probing_rows(recipe: Recipe) -> int:
    """Rows that are run through each layer one at a time to find what shares and feeds inputs."""
    smoothing = sum(t.method != "rotate" for t in recipe.transforms)
    return 1 + smoothing * (1 + FOLD_PROBES)


FOLD_PROBES = 8  # runs of one row that find and check the folds of a layer


def batches(work: Work) -> int:
    return math.ceil(work.rows / work.recipe.execution.batch_size)
