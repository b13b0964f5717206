"""Learned rounding (SignRound, Cheng et al. 2023, arXiv:2309.05516) of a whole decoder layer.

Rounding to nearest and GPTQ weigh each linear on its own. Here the layer runs with its quantized
weights on minibatches of calibration rows, and signed gradient descent moves what is rounded so
that the layer's output comes nearer to what the float model puts out there. Every weight has a
latent x in steps of its scale, every group a scale s:

    w ~ (round(x) - zero_point) * s

The gradient passes the rounding as if it were not there (straight-through). x stays within `reach`
of its start (the paper's V in [-0.5, 0.5]) and within the codes' range; s is multiplied by a
learned factor, which is the paper's clip (alpha and beta) without a division: codes do not hang on
it here, so its gradient is exact. Step sizes fall linearly to zero.

The paper steps by the sign of the gradient: every weight moves alike, also where the gradient is
noise or has become small. Scales do that here; a latent moves by its gradient over the gradient's
running root mean square, which is as free of units, and comes to rest where the error is least.
From GPTQ's solution that is the difference between a third less error and none (docs/log.md).

Latents start on the codes of another solution, GPTQ's or the nearest ones, but as far towards w / s
as rounds to the same: so the weights that were rounded furthest turn first. What is returned is
never worse than the start on the rows that are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...calib.model import LayerCall
from ...kernels.affine import quantize_affine
from ...kernels.errors import UserError
from ..quantized import Quantized, elements
from ..ranges import choose_qparams
from ..spec import Channel, Group, QuantSpec
from .settings import SignRoundSettings

ON_CODE = 0.49  # latents start nearer than half a step to their codes, so that they round to them
REACH = 1.6  # over 2^bits: the default reach, in steps of the scale
RMS_DECAY = 0.98
LEAST_RMS = 1e-30  # of a gradient: a weight whose input is always zero stays
CHECKS = 4  # how often in a run the loss is measured and the best solution kept
CHECKED_ROWS = 16
LEAST_ENERGY = 1e-12  # mean square of a token's target below which its error counts no more


class SignRoundResult(NamedTuple):
    """quantized: by the linears' names. start_error, error: at the start and as returned, squared
    output difference over squared output, averaged over the tokens of the checked rows."""

    quantized: dict[str, Quantized]
    start_error: float
    error: float


def check_learnable(spec: QuantSpec) -> None:
    """UserError for formats that learned rounding has no latents for."""
    if spec.type != "int" or not isinstance(spec.granularity, Group | Channel):
        raise UserError(
            f"signround learns the rounding to integers in groups or channels, not {spec.type} "
            f"{spec.granularity}; take gptq or rtn"
        )


def nearest_start(
    w: Tensor, spec: QuantSpec, scale_dtype: torch.dtype, importance: Tensor
) -> Quantized:
    """w [out, in] rounded to nearest, scales searched under importance [in] (H's diagonal)."""
    p = choose_qparams(w, spec, scale_dtype, importance)
    codes = quantize_affine(w, p.float_scale(), p.zero_point, elements(spec))
    return Quantized(codes, p.scale, p.zero_point, spec)


def signround_layer(
    layer: nn.Module,
    weights: Mapping[str, Tensor],
    start: Mapping[str, Quantized],
    calls: Sequence[LayerCall],
    targets: Sequence[Tensor],
    settings: SignRoundSettings,
) -> SignRoundResult:
    """Learn the rounding of the linears `weights` (name within the layer -> float [out, in]).

    start: what to begin with, by the same names; its scheme, zero-points and scale dtype stay.
    targets: the outputs [rows, seq, hidden] that `calls` should lead to, call by call; rows that
    are not finite are left out. The layer runs in the dtype and on the device of its parameters
    and is not changed. Deterministic by seed. May be called in inference mode.
    """
    for q in start.values():
        check_learnable(q.spec)
    with torch.inference_mode(False), torch.enable_grad():
        latents = {n: _Latent(w, start[n], settings) for n, w in weights.items()}
        trained = _Trained(layer, latents)
        batches = _Batches(calls, targets, settings)
        best, start_error = trained.snapshot(), trained.error(batches.checked())
        best_error = start_error
        every = -(-settings.iterations // CHECKS)
        for i in range(settings.iterations):
            trained.step(batches.draw(), 1 - i / settings.iterations)
            if (i + 1) % every == 0 or i + 1 == settings.iterations:
                error = trained.error(batches.checked())
                if error < best_error:
                    best_error, best = error, trained.snapshot()
        return SignRoundResult(best, start_error, best_error)


class _Trained:
    """A layer that runs with the weights that its latents stand for."""

    def __init__(self, layer: nn.Module, latents: dict[str, _Latent]) -> None:
        self._layer, self._latents = layer, latents
        self._fixed = {n: plain(p) for n, p in layer.named_parameters()}
        self._fixed |= {n: plain(b) for n, b in layer.named_buffers()}
        self._dtype = next(layer.parameters()).dtype

    def snapshot(self) -> dict[str, Quantized]:
        return {n: latent.quantized() for n, latent in self._latents.items()}

    @torch.no_grad()
    def error(self, batches: Iterator[_Batch]) -> float:
        """The mean loss over all rows of `batches`."""
        leaves = self._leaves()
        total, rows = 0.0, 0
        for batch in batches:
            total += float(self._loss(leaves, batch)) * len(batch.target)
            rows += len(batch.target)
        return total / rows

    def step(self, batch: _Batch, decay: float) -> None:
        """One step of descent on `batch`; decay: what is left of the step sizes."""
        leaves = {n: leaf.requires_grad_() for n, leaf in self._leaves().items()}
        loss = self._loss(leaves, batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for latent, gradient in zip(self._latents.values(), gradients, strict=True):
            if gradient is not None:  # an expert that no token of the batch was routed to
                latent.step(gradient, decay)

    def _leaves(self) -> dict[str, Tensor]:
        return {n: latent.weight(self._dtype) for n, latent in self._latents.items()}

    def _loss(self, leaves: dict[str, Tensor], batch: _Batch) -> Tensor:
        parameters = self._fixed | {f"{n}.weight": leaf for n, leaf in leaves.items()}
        out = functional_call(self._layer, parameters, (batch.call.hidden,), batch.call.kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return ((out.float() - batch.target).square_() * batch.weight).mean()


class _Latent:
    """The trained state of one linear: latents x [out, groups, columns of a group] and the factor
    of each group's scale [out, groups, 1], both float32."""

    def __init__(self, w: Tensor, start: Quantized, settings: SignRoundSettings) -> None:
        self._start = start
        limits = elements(start.spec)
        reach = settings.reach or REACH / 2**start.spec.num_bits
        # sizes that fall linearly to zero sum up to half the first one times their number
        self._size = 2 * reach / settings.iterations
        self._scale_size = 2 * settings.scale_reach / settings.iterations
        shape = (*start.scale.shape, -1)
        self._scale = plain(start.float_scale()).unsqueeze(-1)
        self._sign = self._scale.sign()
        zero = start.zero_point
        self._zero = None if zero is None else plain(zero).float().unsqueeze(-1)
        exact = plain(w).float().reshape(shape) / self._scale
        if self._zero is not None:
            exact += self._zero
        codes = plain(start.codes).float().reshape(shape)
        self._x = codes + (exact - codes).clamp_(-ON_CODE, ON_CODE)
        self._x.clamp_(limits.lowest, limits.highest)
        self._low = (self._x - reach).clamp_(min=limits.lowest)
        self._high = (self._x + reach).clamp_(max=limits.highest)
        self._factor = torch.ones_like(self._scale)
        self._square, self._steps = torch.zeros_like(self._x), 0  # running mean of g^2
        self._centred = self._x

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The values [out, in] as they would be stored."""
        self._centred = self._x.round()
        if self._zero is not None:
            self._centred.sub_(self._zero)
        value = self._centred * self._stored_scale().float()
        return value.to(dtype).reshape(self._start.codes.shape)

    def step(self, gradient: Tensor, decay: float) -> None:
        """Move against `gradient`, the loss's with respect to the last `weight`; decay: what is
        left of the step sizes."""
        g = gradient.reshape(self._x.shape).float()
        by_factor = self._centred.mul_(g).sum(-1, keepdim=True).mul_(self._sign)
        self._factor.sub_(by_factor.sign_(), alpha=self._scale_size * decay)
        self._steps += 1
        self._square.mul_(RMS_DECAY).addcmul_(g, g, value=1 - RMS_DECAY)
        unbiased = 1 - RMS_DECAY**self._steps  # of a mean that began with zero
        rms = (self._square / unbiased).sqrt_().clamp_(min=LEAST_RMS)
        self._x.addcmul_(g.div_(rms), self._sign, value=-self._size * decay)
        torch.clamp(self._x, self._low, self._high, out=self._x)

    def quantized(self) -> Quantized:
        codes = self._x.round().to(torch.int8).reshape(self._start.codes.shape)
        return self._start._replace(codes=codes, scale=self._stored_scale().squeeze(-1))

    def _stored_scale(self) -> Tensor:
        return (self._scale * self._factor).to(self._start.scale.dtype)


class _Batch(NamedTuple):
    """A minibatch: what the layer is called with, the outputs aimed at, float32 [rows, seq,
    hidden], and each token's weight in the loss, [rows, seq, 1]."""

    call: LayerCall
    target: Tensor
    weight: Tensor


class _Batches:
    """Draws minibatches, each of rows of one call; every row comes once before any comes again."""

    def __init__(
        self, calls: Sequence[LayerCall], targets: Sequence[Tensor], settings: SignRoundSettings
    ) -> None:
        self._calls, self._targets, self._size = calls, targets, settings.batch_size
        self._rows = [_finite_rows(c, t) for c, t in zip(calls, targets, strict=True)]
        if not any(len(rows) for rows in self._rows):
            raise UserError("every calibration row is non-finite: check the model's weights")
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._queue: list[tuple[int, Tensor]] = []

    def draw(self) -> _Batch:
        if not self._queue:
            for index, rows in enumerate(self._rows):
                shuffled = rows[torch.randperm(len(rows), generator=self._generator)]
                self._queue += [(index, part) for part in shuffled.split(self._size) if len(part)]
            order = torch.randperm(len(self._queue), generator=self._generator).tolist()
            self._queue = [self._queue[i] for i in order]
        return self._batch(*self._queue.pop())

    def checked(self) -> Iterator[_Batch]:
        """The first CHECKED_ROWS rows, always the same."""
        left = CHECKED_ROWS
        for index, rows in enumerate(self._rows):
            for part in rows[:left].split(self._size):
                if len(part):
                    yield self._batch(index, part)
            left -= min(left, len(rows))

    def _batch(self, index: int, rows: Tensor) -> _Batch:
        call, target = self._calls[index], self._targets[index]
        rows = rows.to(target.device)
        aim = target[rows].float()
        energy = aim.square().mean(-1, keepdim=True)
        return _Batch(take_rows(call, rows), aim, energy.clamp_(min=LEAST_ENERGY).reciprocal_())


def _finite_rows(call: LayerCall, target: Tensor) -> Tensor:
    """Numbers of the rows, int64 on the CPU, whose input and target are finite."""
    finite = torch.isfinite(call.hidden).flatten(1).all(1) & torch.isfinite(target).flatten(1).all(
        1
    )
    return plain(finite).nonzero().squeeze(1).cpu()


def take_rows(call: LayerCall, rows: Tensor) -> LayerCall:
    """The call for some of its rows, int64 [n], copied: of keywords, tensors whose first dimension
    counts rows are cut, also within tuples."""
    count = len(call.hidden)

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        if count > 1 and value.ndim > 1 and len(value) % count == 0:
            return value.unflatten(0, (count, -1))[rows].flatten(0, 1)
        return plain(value)

    return LayerCall(call.hidden[rows], {key: cut(v) for key, v in call.kwargs.items()})


def plain(x: Tensor) -> Tensor:
    """x as autograd takes it: detached, and copied where it was made in inference mode."""
    return x.detach().clone() if x.is_inference() else x.detach()
