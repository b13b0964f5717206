"""A type for every matrix so that a file keeps to a number of bits per weight and diverges least.

What a type costs a matrix is the KL divergence that its rounding error is predicted to bring
(quantize/sensitivity.py for linears; for the embedding the Fisher information of what it puts out,
gguf/embedding.py, each row as often as its token occurs). Which type each gets is the knapsack of
passes/budget.py. Norms and the like count with the bits that every file gives them; the matrix
that gives the logits, whose error no layer weighs, and what the user has named keep their types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...calib.fisher import LayerFisher, run_backward
from ...calib.model import LayeredModel
from ...calib.statistics import Hessian
from ...kernels.errors import UserError
from ...kernels.names import names_in_model
from ..checkpoint.load import Checkpoint
from ..passes.budget import Option, allocate
from ..passes.gptq import factor_hessian
from ..passes.settings import GPTQSettings
from ..sensitivity import error_costs, sampled_rows
from .blocks import CODECS, Codec
from .encoding import Entry
from .export import plan, read_hyperparameters
from .imatrix_run import Settings, open_with_rows
from .mix import EMBEDDING, OUTPUT, parse_override
from .type_plan import wish

CANDIDATES = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
SMALL_CANDIDATES = ("Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # blocks of 32
MIX = "Q4_K_M"  # whose types the matrices keep that are not chosen
NAMED_BY = {  # general.file_type by the type of most weights
    "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M",
}  # fmt: skip
ROWS = 16  # of calibration, on which errors are weighed
FISHER_BATCH = 4


@dataclass(frozen=True)
class TypeBudget:
    """What was chosen: `types` by tensor, `file_type` that the file is called by. `bits`: per
    weight of the whole file. `predicted_kld`, `bound`: of the matrices chosen for, in nats; no
    choice within the budget is predicted to cost less than `bound`."""

    asked: float
    bits: float
    file_type: str
    predicted_kld: float
    bound: float
    types: dict[str, str]

    def tensor_types(self) -> list[str]:
        """The choice as "PATTERN=TYPE" of single tensors."""
        return [f"^{re.escape(name)}$={kind}" for name, kind in self.types.items()]


def budget_types(
    folder: Path,
    bits: float,
    settings: Settings,
    tensor_types: Sequence[str] = (),
    feedback: bool = False,
    progress: Callable[[str], object] = lambda name: None,
) -> TypeBudget:
    """Types for the model in `folder` of at most `bits` per weight, everything counted.

    settings: whose first rows of calibration say what errors cost. tensor_types: "PATTERN=TYPE"
    that stay. feedback: whether GPTQ is to round. progress: called with each layer's name.
    UserError where even the smallest types take more, and for a checkpoint that is quantized.
    """
    checkpoint = Checkpoint(folder)
    if checkpoint.schemes:
        raise UserError(f"{folder} is quantized: a budget weighs the types of an original model")
    h = read_hyperparameters(checkpoint)
    entries = plan(checkpoint, h, wish(MIX, tensor_types=tensor_types))
    fixed = [re.compile(parse_override(text)[0]) for text in tensor_types]
    logits = EMBEDDING if h.tied else OUTPUT
    free = [e for e in entries if e.planned.name != logits and _is_free(e, fixed)]
    model, rows, _ = open_with_rows(folder, settings)
    costs = _costs(model, checkpoint, free, rows[:ROWS], feedback, progress)
    weights = sum(e.planned.weights for e in entries)
    kept = 8 * sum(e.planned.nbytes for e in entries if e not in free)
    units = [_options(e, costs[e.planned.name]) for e in free]
    room = int(bits * weights) - kept
    least = sum(min(o.size for o in options) for options in units)
    if least > room:
        raise UserError(
            f"a budget of {bits:g} bits per weight cannot be kept: the smallest types take "
            f"{(least + kept) / weights:.3f}; raise it, or name smaller ones for tensors that keep "
            f"theirs ({logits} above all) with --tensor-type"
        )
    chosen = allocate(units, room)
    picked = [options[i] for options, i in zip(units, chosen.choice, strict=True)]
    types = {e.planned.name: str(o.key) for e, o in zip(free, picked, strict=True)}
    file_type = _name_of(free, types)
    stay = (e.planned for e in entries if e.planned.codec.block > 1 and not _named(e, fixed))
    types = {planned.name: planned.codec.name for planned in stay} | types
    return TypeBudget(
        asked=bits,
        bits=(chosen.size + kept) / weights,
        file_type=file_type,
        predicted_kld=chosen.cost,
        bound=chosen.bound,
        types=types,
    )


def candidates(columns: int) -> list[str]:
    """The types that a matrix with so many columns can take."""
    large = [kind for kind in CANDIDATES if columns % CODECS[kind].block == 0]
    kinds = large if len(large) > 1 else list(SMALL_CANDIDATES)
    return [kind for kind in kinds if columns % CODECS[kind].block == 0]


def _is_free(entry: Entry, fixed: Sequence[re.Pattern[str]]) -> bool:
    planned = entry.planned
    return (
        planned.codec.block > 1 and bool(candidates(planned.shape[-1])) and not _named(entry, fixed)
    )


def _named(entry: Entry, fixed: Sequence[re.Pattern[str]]) -> bool:
    """Whether the user has said what type the tensor is to have."""
    return any(pattern.search(entry.planned.name) for pattern in fixed)


def _options(entry: Entry, costs: Mapping[str, float]) -> list[Option]:
    planned = entry.planned
    return [
        Option(kind, 8 * planned._replace(codec=CODECS[kind]).nbytes, cost)
        for kind, cost in costs.items()
    ]


def _name_of(free: Sequence[Entry], types: Mapping[str, str]) -> str:
    weights: dict[str, int] = {}
    for entry in free:
        kind = types[entry.planned.name]
        weights[kind] = weights.get(kind, 0) + entry.planned.weights
    most = max(weights, key=lambda kind: weights[kind])
    return NAMED_BY.get(most, most)


def _costs(
    model: LayeredModel,
    checkpoint: Checkpoint,
    free: Sequence[Entry],
    rows: Tensor,
    feedback: bool,
    progress: Callable[[str], object],
) -> dict[str, dict[str, float]]:
    """Of each matrix by tensor name: what every type that it can take is predicted to cost."""
    names = names_in_model(model.model, [m for e in free for m in e.modules])
    places = {names[m]: e for e in free for m in e.modules if e.planned.name != EMBEDDING}
    costs = {e.planned.name: dict.fromkeys(candidates(e.planned.shape[-1]), 0.0) for e in free}

    def visit(layer: LayerFisher) -> None:
        for shared in layer.inputs:
            factor = factor_hessian(shared.hessian.mean(), GPTQSettings())
            for name in shared.readers:
                entry = places[name]
                w = layer.modules[name].weight.detach().float()
                sampled = sampled_rows(len(w))
                own = costs[entry.planned.name]
                errors = (_error(w[sampled], CODECS[kind], factor.diagonal) for kind in own)
                found = error_costs(
                    errors, sampled, len(w), shared.hessian, factor, layer.fisher[name], feedback
                )
                for kind, cost in zip(list(own), found, strict=True):
                    own[kind] += cost
        progress(layer.name)

    gradients = run_backward(model, rows, places.__contains__, visit, FISHER_BATCH)
    embedding = next((e for e in free if e.planned.name == EMBEDDING), None)
    if embedding is not None:
        weight = checkpoint.shards.get(f"{embedding.modules[0]}.weight").float()
        own = costs[EMBEDDING]
        for kind in own:
            own[kind] = _embedding_cost(weight, CODECS[kind], rows, gradients)
    return costs


def _embedding_cost(
    weight: Tensor, codec: type[Codec], rows: Tensor, gradients: Sequence[Tensor]
) -> float:
    """Half the mean of e^T F e over the tokens of `rows`, e what rounding does to their row."""
    fisher = Hessian(weight.shape[1])
    for gradient in gradients:
        fisher.add(gradient)
    tokens, counts = rows.flatten().unique(return_counts=True)
    error = _error(weight[tokens], codec, fisher.mean().diagonal())
    each = ((error @ fisher.mean()) * error).sum(1)
    return 0.5 * float((each * counts).sum() / counts.sum())


def _error(w: Tensor, codec: type[Codec], importance: Tensor) -> Tensor:
    return w - codec.decode(codec.encode(w.contiguous(), importance.contiguous()))
