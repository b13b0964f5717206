"""What a GGUF block type is: float32 rows to bytes and back.

A row is cut into blocks of consecutive columns, each stored in the same number of bytes. Blocks are
independent, so many are done at once: a slice of rows on each thread. Every encoder gives
llama.cpp's own bytes, hence its order of float32 operations: sums go column by column (search.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

SLICE = 1 << 17  # weights encoded at once: fewer, and calls cost more than what they compute
DECODE_SLICE = 1 << 20


T = TypeVar("T")


def in_threads(work: Callable[[int], T], starts: Iterable[int]) -> list[T]:
    """What `work` makes of each slice, on as many threads as torch may use, each of which has
    torch's operations to itself: spread over threads they would wait for each other. Sets torch's
    number of threads meanwhile.
    """
    inference = torch.is_inference_mode_enabled()  # which holds in one thread alone
    threads = torch.get_num_threads()

    def run(start: int) -> T:
        # sums of huge rows overflow
        with torch.inference_mode(inference), np.errstate(all="ignore"):
            return work(start)

    torch.set_num_threads(1)  # new threads take it over
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(run, starts))
    finally:
        torch.set_num_threads(threads)


class Codec(ABC):
    """One block type. `block`: weights in a block; `nbytes`: bytes in a block.

    `uses_importance`: an importance matrix changes what is stored. `needs_importance`: llama.cpp
    will not encode without one.
    """

    name: ClassVar[str]
    block: ClassVar[int]
    nbytes: ClassVar[int]
    uses_importance: ClassVar[bool] = False
    needs_importance: ClassVar[bool] = False
    slice_weights: ClassVar[int] = SLICE

    @classmethod
    def row_bytes(cls, columns: int) -> int:
        """Bytes of a row of `columns` weights; `columns` is a multiple of the block."""
        assert columns % cls.block == 0, (cls.name, columns)
        return columns // cls.block * cls.nbytes

    @classmethod
    def encode(cls, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """float32 [rows, columns] to uint8 [rows, row_bytes(columns)].

        importance: float32 [columns], how much the squared error of each column matters: the mean
        square of what multiplies it. Types without `uses_importance` leave it aside.
        """
        assert x.dtype == torch.float32, x.dtype
        assert importance is not None or not cls.needs_importance, cls.name
        if not cls.uses_importance:
            importance = None
        shape = (x.shape[0], cls.row_bytes(x.shape[1]))
        out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        step = max(1, cls.slice_weights // x.shape[1])

        def encode_slice(start: int) -> None:
            out[start : start + step] = cls.encode_rows(x[start : start + step], importance)

        in_threads(encode_slice, range(0, len(x), step))
        return out

    @classmethod
    def encode_rows(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        """Rows [rows, columns], small enough to be done at once, to uint8 [rows, bytes]."""
        if importance is not None:
            importance = importance.expand_as(x).reshape(-1, cls.block)
        return cls.encode_blocks(x.reshape(-1, cls.block), importance).view(len(x), -1)

    @classmethod
    def decode(cls, data: Tensor) -> Tensor:
        """uint8 [rows, bytes] to float32 [rows, bytes // nbytes * block]."""
        assert data.dtype == torch.uint8 and data.shape[1] % cls.nbytes == 0, data.shape
        shape = (data.shape[0], data.shape[1] // cls.nbytes * cls.block)
        out = torch.empty(shape, device=data.device)
        step = max(1, DECODE_SLICE // out.shape[1])
        for i in range(0, data.shape[0], step):
            blocks = data[i : i + step].reshape(-1, cls.nbytes)
            out[i : i + step] = cls.decode_blocks(blocks).view(-1, out.shape[1])
        return out

    @classmethod
    @abstractmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        """float32 [n, block], and the importance of each weight where it counts, to uint8
        [n, nbytes]."""

    @classmethod
    @abstractmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        """uint8 [n, nbytes] to float32 [n, block]."""
