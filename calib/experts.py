"""Mixture-of-experts layers with one nn.Linear for every matrix of every expert.

transformers holds the experts of a layer in 3-D parameters and merges the checkpoint's per-expert
tensors into them on loading. Quantization wants the checkpoint's view: each expert's matrices read
other tokens, have their own statistics and are stored under their own names. So the fused module is
replaced by one that has a linear for each, named as the checkpoint names its tensor, and routes
tokens as transformers does. Gates and activations stay those of the fused module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from ..kernels.errors import UserError


class ExpertNames(NamedTuple):
    """What the linears of an expert are called. gate: None where experts have no gate."""

    gate: str | None
    up: str
    down: str

    @property
    def inner(self) -> tuple[str, ...]:
        """The linears that read the expert's input; they share it."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


class Route(NamedTuple):
    """The tokens of one expert: rows of the hidden states, and which of their top-k it is."""

    expert: int
    tokens: Tensor
    slots: Tensor


class SplitExperts(nn.Module):
    """The experts of one layer. Expert e's linears are submodules e.NAME, for NAME in `names`."""

    def __init__(self, fused: Any, names: ExpertNames) -> None:
        """`fused`: transformers' module, decorated by its use_experts_implementation.

        The linears' parameters are on meta, whatever those of `fused` are.
        """
        super().__init__()
        self.names, self.num_experts = names, int(fused.num_experts)
        self.transposed, self.concatenated = fused.is_transposed, fused.is_concatenated
        self.has_bias = fused.has_bias
        for name, child in fused.named_children():  # activations may have buffers
            self.add_module(name, child)
        self._fused = [fused]  # in a list: not a submodule
        hidden, inner = fused.down_proj.shape[1:]
        if self.transposed:
            hidden, inner = inner, hidden
        self.inner_features = inner  # what a down projection reads
        shapes = dict.fromkeys(names.inner, (hidden, inner)) | {names.down: (inner, hidden)}
        for expert in range(self.num_experts):
            linears = {
                name: nn.Linear(*shape, self.has_bias, "meta", fused.down_proj.dtype)
                for name, shape in shapes.items()
            }
            self.add_module(str(expert), nn.ModuleDict(linears))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], top_k_index int64 and top_k_weights [tokens, top_k].

        Sums over a token's experts are float32 where the hidden states are narrower.
        """
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        out = torch.zeros_like(hidden_states, dtype=wide)
        for expert, tokens, slots in self.routes(top_k_index):
            down = self.linears(expert)[self.names.down]
            y = down(self.inner(expert, hidden_states[tokens]))
            out.index_add_(0, tokens, (y * top_k_weights[tokens, slots, None]).to(wide))
        return out.to(hidden_states.dtype)

    def linears(self, expert: int) -> nn.ModuleDict:
        """The linears of an expert by name."""
        linears = self.get_submodule(str(expert))
        assert isinstance(linears, nn.ModuleDict)
        return linears

    def inner(self, expert: int, rows: Tensor) -> Tensor:
        """What the expert's down projection reads [n, inner] when its input is rows [n, hidden]."""
        linears, fused = self.linears(expert), self._fused[0]
        if self.names.gate is None:
            return fused.act_fn(linears[self.names.up](rows))
        gate, up = linears[self.names.gate](rows), linears[self.names.up](rows)
        if self.concatenated:
            return fused._apply_gate(torch.cat([gate, up], -1))
        return fused._apply_gate(torch.stack([gate, up], -1).flatten(-2))

    def routes(self, top_k_index: Tensor) -> Iterator[Route]:
        """The experts that have tokens, in order. Ids past the last expert name no expert."""
        top_k = top_k_index.shape[-1]
        order = top_k_index.flatten().argsort(stable=True)
        start = 0
        for expert, count in enumerate(self.token_counts(top_k_index).tolist()):
            if count:
                picked = order[start : start + count]
                yield Route(expert, picked // top_k, picked % top_k)
            start += count

    def token_counts(self, top_k_index: Tensor) -> Tensor:
        """How many tokens each expert is given, int64 [num_experts]."""
        ids = top_k_index.flatten().clamp(max=self.num_experts)
        return torch.bincount(ids, minlength=self.num_experts + 1)[: self.num_experts]


def split_experts(model: Any) -> None:
    """Replace every fused experts module of `model` that can be taken apart, in place."""
    converters = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightConverter)]
    for path, module in list(model.named_modules()):
        if _is_fused(module):
            names = _names_on_disk(path, module, converters)
            if names is not None:
                parent, _, leaf = path.rpartition(".")
                setattr(model.get_submodule(parent), leaf, SplitExperts(module, names))


def split_modules(model: nn.Module) -> dict[str, SplitExperts]:
    """The split experts modules of `model` by path."""
    return {p: m for p, m in model.named_modules() if isinstance(m, SplitExperts)}


def check_experts_are_split(model: nn.Module) -> None:
    """UserError when some experts' weights are in no nn.Linear: they would stay unquantized."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) or "experts" not in path.split("."):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                raise UserError(
                    f"'{path}.{name}' holds experts as {type(module).__name__} does, which lowbit "
                    "cannot take apart into the linears that it quantizes; choose another model"
                )


def routers(model: nn.Module) -> list[str]:
    """Modules that decide which experts a token is given, or how much of a shared one it gets.

    They are small and decisive, readers of checkpoints expect them unquantized.
    """
    found = []
    for path, experts in split_modules(model).items():
        block_path = path.rpartition(".")[0]
        for name, module in model.get_submodule(block_path).named_modules(prefix=block_path):
            weight = module._parameters.get("weight")
            inside = name == path or name.startswith(f"{path}.")
            if inside or weight is None or weight.ndim != 2:
                continue
            steers = re.search(r"(gate|router)(\.|$)", name.removeprefix(block_path))
            if steers and weight.shape[0] in (1, experts.num_experts):
                found.append(name)
    return found


def _is_fused(module: nn.Module) -> bool:
    """Whether it keeps the contract of transformers' use_experts_implementation."""
    down = module._parameters.get("down_proj")
    return (
        down is not None
        and down.ndim == 3
        and hasattr(module, "_apply_gate")
        and not getattr(module, "has_post_expert_norm", True)
    )


def _names_on_disk(path: str, fused: Any, converters: list[WeightConverter]) -> ExpertNames | None:
    """The linears' names in checkpoints; None when they are merged in a way that is not known.

    Models whose checkpoints hold the 3-D tensors themselves take the names of most others.
    """
    found: dict[str, list[str]] = {}
    for parameter in ("gate_up_proj", "down_proj") if fused.has_gate else ("up_proj", "down_proj"):
        names = _merged_from(f"{path}.{parameter}", converters)
        if names is None:
            return None
        found[parameter] = names
    (down,) = found["down_proj"] or ["down_proj"]
    if not fused.has_gate:
        (up,) = found["up_proj"] or ["up_proj"]
        return ExpertNames(None, up, down)
    gate, up = found["gate_up_proj"] or ["gate_proj", "up_proj"]
    return ExpertNames(gate, up, down)


def _merged_from(parameter: str, converters: list[WeightConverter]) -> list[str] | None:
    """Names of the linears that `parameter` is merged from, in order: empty when it is stored as it
    is, None when something else is done to it than to merge experts and concatenate linears."""
    for converter in converters:
        target = converter.target_patterns[0].replace("\\", "").lstrip(".")
        if not f".{parameter}".endswith(f".{target}"):
            continue
        sources = [s.replace("\\", "").lstrip(".") for s in converter.source_patterns]
        prefix = re.escape(target.rpartition(".")[0])
        leaves = [re.fullmatch(rf"{prefix}\.\*\.(\w+)\.weight", s) for s in sources]
        operations = [type(o) for o in converter.operations]
        merges = [MergeModulelist, *([Concatenate] if len(sources) > 1 else [])]
        if operations != merges or len(converter.target_patterns) > 1 or not all(leaves):
            return None
        return [leaf[1] for leaf in leaves if leaf]
    return []
