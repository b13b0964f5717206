"""How a text is cut into windows, and which positions of a window count.

Window i holds tokens [i * stride, i * stride + ctx). Its fresh positions are those that no earlier
window held: all ctx of the first, the last `stride` of every other; divergence is taken at each of
them. The negative log-likelihood is taken of each fresh token but a window's first, which nothing
precedes. A partial window at the end is dropped. With stride = ctx windows do not overlap; with
stride < ctx this is the sliding window of transformers' perplexity recipe; stride = ctx and a skip
of ctx / 2 are llama-perplexity's windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from ..kernels.errors import UserError

Bos = Literal["none", "first", "each"]


@dataclass(frozen=True)
class Windowing:
    """`ctx` and `stride` in tokens; `windows`: at most so many (None: as many as the text holds).

    `bos`: the BOS token stands in place of the first token of no window, of the first window, or of
    each. That token is never scored, so the rule changes what the model sees, not what is scored.
    `skip`: so many positions at the beginning of each window are not fresh: context alone.
    """

    ctx: int
    stride: int
    bos: Bos = "none"
    windows: int | None = 10
    skip: int = 0

    def __post_init__(self) -> None:
        if self.ctx < 2:
            raise UserError(f"ctx must be at least 2 tokens, got {self.ctx}")
        if not 1 <= self.stride <= self.ctx:
            raise UserError(f"stride must be from 1 to ctx = {self.ctx}, got {self.stride}")
        if self.windows is not None and self.windows < 1:
            raise UserError(f"windows must be at least 1, got {self.windows}")
        if not 0 <= self.skip < self.ctx:
            raise UserError(f"skip must be from 0 to below ctx = {self.ctx}, got {self.skip}")
        if self.bos not in get_args(Bos):
            raise UserError(f"bos must be one of {', '.join(get_args(Bos))}, got '{self.bos}'")

    @property
    def tokens(self) -> int | None:
        """How many tokens of a text are read; None: all."""
        return None if self.windows is None else self.ctx + (self.windows - 1) * self.stride


class Window(NamedTuple):
    """`ids` int64 [ctx], as the model sees them; `fresh`: first position no earlier window held."""

    ids: Tensor
    fresh: int

    @property
    def first_scored(self) -> int:
        """Position of the first token whose likelihood counts."""
        return max(self.fresh, 1)


def cut_windows(ids: Tensor, windowing: Windowing, bos_token_id: int | None) -> list[Window]:
    """The windows of a text's token ids int64 [n]; UserError when it holds none."""
    ctx, stride = windowing.ctx, windowing.stride
    available = (len(ids) - ctx) // stride + 1 if len(ids) >= ctx else 0
    if available < 1:
        raise UserError(
            f"the text holds {len(ids)} tokens, fewer than one window of ctx = {ctx}; lower --ctx "
            "or give a longer text"
        )
    if windowing.bos != "none" and bos_token_id is None:
        raise UserError(f"bos '{windowing.bos}' was asked for, but the tokenizer has no BOS token")
    bos = -1 if bos_token_id is None else bos_token_id
    count = available if windowing.windows is None else min(available, windowing.windows)
    windows = []
    for i in range(count):
        row = ids[i * stride : i * stride + ctx].clone()
        if windowing.bos == "each" or (windowing.bos == "first" and i == 0):
            row[0] = bos
        windows.append(Window(row, max(windowing.skip, 0 if i == 0 else ctx - stride)))
    return windows
