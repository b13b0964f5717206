"""SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): activations' range moves into the weights.

Activations have few channels that are far larger than the rest, and an 8-bit scale for a whole
token must reach them, so the others keep few steps. Weights are even. Dividing input channel j by

    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)

and multiplying the weight's column with it shares the difficulty between both. alpha is given, or
chosen among a grid by the error of the linears' outputs on a sample of tokens with both operands
rounded. quantize/passes/balance.py finds scales without this formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .balance import centred, of_each_scale

ALPHAS = tuple(round(0.05 * step, 2) for step in range(4, 20))  # 0.2 to 0.95
LEAST_RANGE = 1e-5

Rounding = Callable[[Tensor], Tensor]  # values to what they are worth when quantized


class AlphaChoice(NamedTuple):
    """scales float32 [scales], the alpha that made them (None: no scales), the squared error of
    the outputs, and that without scales."""

    scales: Tensor
    alpha: float | None
    loss: float
    plain_loss: float


def smooth_scales(x_peak: Tensor, w_peak: Tensor, alpha: float) -> Tensor:
    """Scales for the largest magnitudes of inputs and weights of each channel, both [scales]."""
    x, w = x_peak.clamp(min=LEAST_RANGE), w_peak.clamp(min=LEAST_RANGE)
    return centred(x**alpha / w ** (1 - alpha))


def best_alpha(
    weights: Tensor,
    x_peak: Tensor,
    sample: Tensor,
    columns: Tensor,
    round_weight: Rounding,
    round_input: Rounding,
    alphas: tuple[float, ...] = ALPHAS,
) -> AlphaChoice:
    """The alpha whose quantized linear errs least, or no scales where that errs less.

    weights: float32 [out, in], of all linears that share the input, stacked. x_peak: float32 [in].
    sample: float32 [tokens, in], inputs. columns: int64 [in], the scale of each input column.
    """
    x = of_each_scale(x_peak, columns).amax(1)
    w = of_each_scale(weights.abs().amax(0), columns).amax(1)
    target = sample @ weights.T
    ones = torch.ones_like(x)
    plain_loss = output_error(weights, sample, target, ones[columns], round_weight, round_input)
    best = AlphaChoice(ones, None, plain_loss, plain_loss)
    for alpha in alphas:
        scales = smooth_scales(x, w, alpha)
        loss = output_error(weights, sample, target, scales[columns], round_weight, round_input)
        if loss < best.loss:
            best = AlphaChoice(scales, alpha, loss, plain_loss)
    return best


def output_error(
    weights: Tensor,
    sample: Tensor,
    target: Tensor,
    by_column: Tensor,
    round_weight: Rounding,
    round_input: Rounding,
) -> float:
    """Mean squared error a token, summed over outputs, of the linear with `by_column` [in] moved
    from its input to its weight and both rounded; target: [tokens, out], the unrounded outputs."""
    got = round_input(sample / by_column) @ round_weight(weights * by_column).T
    return float((got - target).square().sum()) / len(sample)
