"""Statistics of what a linear layer reads, summed over calibration tokens.

Each is keyed by the input, not by the linear: linears that share an input share its statistics.
`STATISTICS` names what a pass may ask for in its `needs`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kernels.triangular import mirror_upper_
from .float32_products import float32_products

TOKENS_A_BATCH = 128  # kept by TokenSample
STRIPS = 8  # a wide Gram matrix is computed in strips, each from its diagonal block rightwards
WIDE = 512  # columns from which strips save more than their smaller products cost
TOKENS_A_CHUNK = 16384  # tokens converted to float32 at once


class Statistic(Protocol):
    """Something that is summed over inputs of one width."""

    def add(self, x: Tensor) -> None:
        """Count the rows of x [..., in_features], any float dtype; all finite."""
        ...


class Hessian:
    """H = mean of x x^T over tokens, float32 [in, in], whatever the inputs' dtype is.

    Summed in float32 without TF32 or autocast: a Hessian summed in bf16 is not positive definite.
    """

    def __init__(self, in_features: int, device: str | torch.device = "cpu") -> None:
        self._sum = torch.zeros(in_features, in_features, device=device)
        self._mean: Tensor | None = None
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        assert self._mean is None, "the sum has become the mean"
        flat = x.reshape(-1, x.shape[-1])
        columns = flat.shape[1]
        strip = -(-columns // STRIPS) if columns >= WIDE else columns
        self.tokens += flat.shape[0]
        exact = flat.dtype == torch.bfloat16
        for chunk in flat.split(TOKENS_A_CHUNK):
            chunk = chunk.float()
            for i in range(0, columns, strip):
                left = chunk[:, i : i + strip]
                add_product(self._sum[i : i + strip, i:], left, chunk[:, i:], exact)

    def mean(self) -> Tensor:
        """H, symmetric, in the sum's own memory: nothing can be added any more, and it is the same
        matrix each time, not to be changed."""
        if self._mean is None:
            with torch.inference_mode():  # the sum may have been made there
                self._mean = mirror_upper_(self._sum).div_(max(1, self.tokens))
        return self._mean


def add_product(total: Tensor, a: Tensor, b: Tensor, bfloat16_values: bool = False) -> None:
    """total += a^T b of float32 [tokens, n], in float32 whatever autocast and TF32 are set to.

    bfloat16_values: a and b hold nothing that bfloat16 cannot. Their products are then exact in
    float32, and a CPU's bfloat16 instructions, which sum in float32, do the same in half the time.
    """
    with (
        float32_products("bf16" if bfloat16_values else "ieee"),
        torch.autocast(a.device.type, enabled=False),
    ):
        total.addmm_(a.T, b)


class InputShift:
    """D = mean of (f - x) x^T over tokens, float32 [in, in]: how what a linear reads, x, has moved
    from what it would read in the float model, f, because of the quantized linears before it."""

    def __init__(self, in_features: int, device: str | torch.device = "cpu") -> None:
        self._sum = torch.zeros(in_features, in_features, device=device)
        self._mean: Tensor | None = None
        self.tokens = 0

    def add_pair(self, x: Tensor, float_x: Tensor) -> None:
        """Count the rows of x [..., in] and of float_x, of the same shape."""
        assert self._mean is None, "the sum has become the mean"
        flat = x.reshape(-1, x.shape[-1])
        others = float_x.reshape(-1, x.shape[-1])
        self.tokens += flat.shape[0]
        for chunk, other in zip(
            flat.split(TOKENS_A_CHUNK), others.split(TOKENS_A_CHUNK), strict=True
        ):
            moved = other - chunk  # rounded to the inputs' dtype once more, an error without a bias
            add_product(self._sum, moved.float(), chunk.float(), flat.dtype == torch.bfloat16)

    def mean(self) -> Tensor:
        """D, in the sum's own memory, as `Hessian.mean`."""
        if self._mean is None:
            with torch.inference_mode():
                self._mean = self._sum.div_(max(1, self.tokens))
        return self._mean


class ChannelRange:
    """Of each input column over all tokens: `peak`, the largest |x|, `mean_abs`, its mean, and
    `mean_square`, all float32 [in]."""

    def __init__(self, in_features: int, device: str | torch.device = "cpu") -> None:
        self.peak = torch.zeros(in_features, device=device)
        self._sum, self._square_sum = torch.zeros_like(self.peak), torch.zeros_like(self.peak)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        self.tokens += flat.shape[0]
        for chunk in flat.split(TOKENS_A_CHUNK) if len(flat) else ():
            magnitude = chunk.float().abs()
            torch.maximum(self.peak, magnitude.amax(0), out=self.peak)
            self._sum += magnitude.sum(0)
            self._square_sum += magnitude.square_().sum(0)

    @property
    def mean_abs(self) -> Tensor:
        return self._sum / max(1, self.tokens)

    @property
    def mean_square(self) -> Tensor:
        return self._square_sum / max(1, self.tokens)


class SquareSum:
    """Of each input column over all tokens: `total`, the sum of squares, float64 [in]."""

    def __init__(self, in_features: int, device: str | torch.device = "cpu") -> None:
        self.total = torch.zeros(in_features, dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        self.tokens += flat.shape[0]
        for chunk in flat.split(TOKENS_A_CHUNK) if len(flat) else ():
            self.total += chunk.float().square().sum(0)


class TokenSample:
    """Some inputs as they are: about TOKENS_A_BATCH of each batch, evenly spaced."""

    def __init__(self, in_features: int, device: str | torch.device = "cpu") -> None:
        self._parts = [torch.empty(0, in_features, device=device)]

    def add(self, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        stride = max(1, len(flat) // TOKENS_A_BATCH) | 1  # odd: at other places in every row
        self._parts.append(flat[stride // 2 :: stride].float())

    def tokens(self) -> Tensor:
        """float32 [tokens, in]."""
        return torch.cat(self._parts)


STATISTICS: dict[
    str,
    type[Hessian] | type[ChannelRange] | type[SquareSum] | type[TokenSample] | type[InputShift],
] = {
    "hessian": Hessian,
    "input_shift": InputShift,
    "channel_range": ChannelRange,
    "square_sum": SquareSum,
    "token_sample": TokenSample,
}
