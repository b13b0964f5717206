"""GPTQ for the token embedding, which no layer reads as a matrix: each row is added to the residual
stream as it is, and every later layer sees its error.

What an error e of a row costs is, to second order, e^T F e / 2 with F the Fisher information of the
hidden states that enter the first layer (calib/fisher.py). So F takes the Hessian's place, and
within a row the later columns make up for the earlier ones. In a model whose embedding has
directions that nothing reads, errors go there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...calib.fisher import run_backward
from ...calib.model import LayeredModel
from ...calib.shards import TensorInfo, TensorSource
from ...calib.statistics import Hessian
from ..passes.gptq import factor_hessian
from ..passes.settings import GPTQSettings
from .blocks.scaled import ScaledCodec
from .gptq import BlocksResult, block_order, gguf_gptq

ROWS_AT_ONCE = 8192  # of the embedding
FISHER_TOKENS = 4096  # of the calibration rows: more gain little, and each is run back through all


def embedding_fisher(model: LayeredModel, rows: Tensor, batch_size: int = 4) -> Tensor:
    """F, float32 [hidden, hidden], from the first of `rows`, token ids int64 [rows, seq]."""
    first = rows[: max(1, FISHER_TOKENS // rows.shape[1])]
    gradients = run_backward(model, first, lambda name: False, lambda layer: None, batch_size)
    fisher = Hessian(gradients[0].shape[-1], gradients[0].device)
    for gradient in gradients:
        fisher.add(gradient)
    return fisher.mean()


def embedding_blocks(
    weight: Tensor, fisher: Tensor, codec: type[ScaledCodec], settings: GPTQSettings, sweeps: int
) -> BlocksResult:
    """Blocks of `weight` [tokens, hidden] of least error under `fisher` [hidden, hidden]."""
    factor = factor_hessian(fisher, settings, block_order(fisher.diagonal(), codec.block))
    parts = [gguf_gptq(rows, factor, codec, sweeps) for rows in weight.split(ROWS_AT_ONCE)]
    return BlocksResult(torch.cat([p.blocks for p in parts]), torch.cat([p.error for p in parts]))


class ReplacedSource:
    """`source` with other values for some of its tensors, by name."""

    def __init__(self, source: TensorSource, values: Mapping[str, Tensor]) -> None:
        assert all(name in source for name in values)
        self._source, self._values = source, values

    @property
    def folder(self) -> Path:
        return self._source.folder

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self._source.info

    def names(self) -> list[str]:
        return self._source.names()

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        if name in self._values:
            return self._values[name].to(device)
        return self._source.get(name, device)

    def close(self) -> None:
        self._source.close()
