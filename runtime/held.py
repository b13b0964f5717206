"""What a loaded model holds: the matrices that tokens are multiplied by, and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .linear import PackedLinear
from .llm import LLM
from .models.projection import PlainLinear
from .paged_engine import PagedEngine


class Matrix(NamedTuple):
    """name: of the module. numbers: of the weight as it multiplies; nbytes: as it is stored."""

    name: str
    numbers: int
    nbytes: int


def matrices(llm: LLM) -> list[Matrix]:
    """Of all linears, the output head among them; no tables of embeddings."""
    table = llm.model.get_input_embeddings().weight
    instead = _own_head(llm)
    return [
        matrix
        for name, module in _modules(llm)
        if instead is None or getattr(module, "weight", None) is not table
        if (matrix := _matrix(name, module)) is not None
    ]


def weight_bytes(llm: LLM) -> int:
    """Of parameters, buffers and packed weights, each storage once."""
    return nbytes_of(t for _, module in _modules(llm) for t in _tensors(module))


def pools(llm: LLM) -> list[Tensor]:
    """The tensors of keys and values; none of the contiguous engine, which makes them as it
    runs."""
    engine = llm._engine
    if not isinstance(engine, PagedEngine):
        return []
    parts = (part for layer in engine._kv.pools for pool in layer for part in
             (pool.codes, pool.scale, pool.offset))  # fmt: skip
    return [part for part in parts if part is not None]


def kv_bytes_per_token(llm: LLM) -> float | None:
    """Of all layers; None for the contiguous engine, before it has run."""
    held = pools(llm)
    return sum(t.nbytes / (t.shape[0] * t.shape[2]) for t in held) if held else None


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Of tensors that may share storages."""
    sizes: dict[int, int] = {}
    for t in tensors:
        if t.is_mkldnn:  # has no storage that torch shows
            sizes[id(t)] = t.nbytes
        else:
            storage = t.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _modules(llm: LLM) -> Iterator[tuple[str, nn.Module]]:
    yield from llm.model.named_modules()
    if (head := _own_head(llm)) is not None:
        yield "lm_head", head


def _own_head(llm: LLM) -> PlainLinear | None:
    """The head that the decoder keeps beside the module's, tied one."""
    engine: Any = llm._engine
    head = getattr(getattr(engine, "_decoder", None), "_head", None)
    if not isinstance(head, PlainLinear) or any(m is head for m in llm.model.modules()):
        return None
    kernel = head.kernel
    return head if kernel is not None and kernel.repacks else None


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """A module's own."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    if isinstance(module, PackedLinear):
        yield from module.tensors
    elif isinstance(module, PlainLinear):
        yield module.packed


def _matrix(name: str, module: nn.Module) -> Matrix | None:
    if isinstance(module, nn.Embedding):
        return None
    if isinstance(module, PackedLinear | PlainLinear):
        numbers = module.in_features * module.out_features
        held = module.tensors if isinstance(module, PackedLinear) else [module.packed]
        return Matrix(name, numbers, nbytes_of(held))
    own = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    if not own or module.__class__.__name__ == "LinearPart":
        return None
    return Matrix(name, sum(p.numel() for p in own), sum(p.nbytes for p in own))
