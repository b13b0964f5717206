"""How a text is cut into windows, and which positions of a window count.

Window i holds tokens [i * stride, i * stride + ctx). Its fresh positions are those that no earlier
window held: all ctx of the first, the last `stride` of every other; divergence is taken at each of
them. The negative log-likelihood is taken of each fresh token but a window's first, which nothing
precedes. A partial window at the end is dropped unless `tail` is asked for. With stride = ctx
windows do not overlap; with stride < ctx and the tail this is the sliding window of transformers'
perplexity recipe; stride = ctx, a skip of ctx / 2 and `predictive` are llama-perplexity's windows.
The rules that have names are in evals/protocols.py.
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
    `predictive`: of the fresh positions those alone count whose next token the window holds, for
    the divergence and, as that token's likelihood, for the perplexity (else a fresh token is
    scored whose prediction is made at the last position before them).
    `tail`: the rest of a text behind the last whole window is a shorter window.
    `special`: the text begins with the tokens that the tokenizer puts before any text.
    """

    ctx: int
    stride: int
    bos: Bos = "none"
    windows: int | None = 10
    skip: int = 0
    predictive: bool = False
    tail: bool = False
    special: bool = False

    def __post_init__(self) -> None:
        if self.ctx < 2:
            raise UserError(f"ctx must be at least 2 tokens, got {self.ctx}")
        if not 1 <= self.stride <= self.ctx:
            raise UserError(f"stride must be from 1 to ctx = {self.ctx}, got {self.stride}")
        if self.windows is not None and self.windows < 1:
            raise UserError(f"windows must be at least 1, got {self.windows}")
        if not 0 <= self.skip < self.ctx - self.predictive:
            raise UserError(
                f"skip must be from 0 to below ctx = {self.ctx - self.predictive}, got {self.skip}"
            )
        if self.bos not in get_args(Bos):
            raise UserError(f"bos must be one of {', '.join(get_args(Bos))}, got '{self.bos}'")

    @property
    def tokens(self) -> int | None:
        """How many tokens of a text are read; None: all."""
        return None if self.windows is None else self.ctx + (self.windows - 1) * self.stride


class Window(NamedTuple):
    """`ids` int64 [ctx], as the model sees them (a tail is shorter); `fresh`: first position that
    counts; `predictive`: as of Windowing."""

    ids: Tensor
    fresh: int
    predictive: bool = False

    @property
    def first_scored(self) -> int:
        """Position of the first token whose likelihood counts."""
        return max(self.fresh + self.predictive, 1)

    @property
    def compared(self) -> slice:
        """The positions at which divergence is taken."""
        return slice(self.fresh, len(self.ids) - self.predictive)

    @property
    def positions(self) -> int:
        """How many these are."""
        return len(self.ids) - self.predictive - self.fresh


def cut_windows(ids: Tensor, windowing: Windowing, bos_token_id: int | None) -> list[Window]:
    """The windows of a text's token ids int64 [n]; UserError when it holds none."""
    ctx, stride = windowing.ctx, windowing.stride
    available = (len(ids) - ctx) // stride + 1 if len(ids) >= ctx else 0
    if windowing.tail and _rest(len(ids), windowing, available) >= 2:
        available += 1
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
        fresh = max(windowing.skip, 0 if i == 0 else ctx - stride)
        windows.append(Window(row, fresh, windowing.predictive))
    return windows


def _rest(tokens: int, windowing: Windowing, whole: int) -> int:
    """Tokens of the window behind the `whole` ones; 0 where they hold all there is."""
    if whole and (whole - 1) * windowing.stride + windowing.ctx >= tokens:
        return 0
    rest = tokens - whole * windowing.stride
    return rest if rest > windowing.skip + windowing.predictive else 0
