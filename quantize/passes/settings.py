"""How each pass runs: small frozen configs. Free of torch, for the command line shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...kernels.errors import UserError, did_you_mean
from ..kv_names import kv_spec_from_name
from ..spec import KVSpec

MAX_DAMP = 1.0  # share of the mean diagonal beyond which a Hessian is hopeless


@dataclass(frozen=True)
class RTNSettings:
    """How rounding to nearest chooses scales: "minmax" takes the plain range of a group, "mse" the
    one of least squared error."""

    scale_search: Literal["minmax", "mse"] = "minmax"

    def __post_init__(self) -> None:
        one_of("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True)
class GPTQSettings:
    """How GPTQ runs.

    dampening_frac: share of the mean of H's diagonal that is added to it, over 0.
    block_size: columns between two lazy updates.
    act_order: "static" processes columns in falling order of H's diagonal, "none" in memory order.
        "desc_act" does so in falling order too and groups columns by it, which the GPTQ formats
        alone can store (g_idx).
    static_groups: scales fixed before from the original weights; otherwise each group's are chosen
        from the current, error-compensated weights when its first column is reached.
    scale_search: "hessian" minimizes squared error weighted by H's diagonal, "minmax" takes the
        plain range.
    input_correction: how much of the error that quantized inputs bring the weights make up for
        (GPTAQ), from 0 to 1; more than 0 runs the float model beside.
    refine_rounds: how often scales and codes are looked at again after the last column (0: not).
    """

    dampening_frac: float = 0.01
    block_size: int = 64
    act_order: Literal["static", "none", "desc_act"] = "static"
    static_groups: bool = True
    scale_search: Literal["hessian", "minmax"] = "hessian"
    input_correction: float = 0.0
    refine_rounds: int = 0

    def __post_init__(self) -> None:
        if self.refine_rounds < 0:
            raise UserError(f"refine_rounds must be at least 0, got {self.refine_rounds}")
        if not 0 <= self.input_correction <= 1:
            raise UserError(f"input_correction must be from 0 to 1, got {self.input_correction}")
        if not 0 < self.dampening_frac <= MAX_DAMP:
            raise UserError(
                f"dampening_frac must be over 0 and at most {MAX_DAMP}, got {self.dampening_frac}"
            )
        at_least_one("block_size", self.block_size)
        one_of("act_order", self.act_order, ("static", "none", "desc_act"))
        one_of("scale_search", self.scale_search, ("hessian", "minmax"))
        if self.act_order == "static" and not self.static_groups:
            raise UserError(
                "act_order 'static' needs static_groups: columns of several groups are "
                "interleaved, so a group's scale must be known before its first column"
            )


@dataclass(frozen=True)
class HQQSettings:
    """How HQQ runs. norm: the p of the l_p norm of the weight error, over 0 and at most 1.
    iterations: half-quadratic steps."""

    norm: float = 1.0
    iterations: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.norm <= 1:
            raise UserError(f"norm must be over 0 and at most 1, got {self.norm}")
        at_least_one("iterations", self.iterations)


@dataclass(frozen=True)
class SignRoundSettings:
    """How learned rounding runs.

    iterations: steps of the descent, on `batch_size` calibration rows each.
    start: "gptq" begins with GPTQ's solution, "nearest" with rounding to nearest under searched
        scales.
    reach: how far a weight may move from its start, in steps of its scale; the sizes of the
        descent's steps sum up to it. None: 1.6 / 2^bits (the finer the codes, the less must turn).
    scale_reach: the same for scales, as a share of them; 0 leaves them as they are.
    seed: decides the order of the rows.
    """

    iterations: int = 200
    batch_size: int = 2
    start: Literal["gptq", "nearest"] = "gptq"
    reach: float | None = None
    scale_reach: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one("iterations", self.iterations)
        at_least_one("batch_size", self.batch_size)
        one_of("start", self.start, ("gptq", "nearest"))
        if self.reach is not None and not 0 < self.reach <= 2:
            raise UserError(f"reach must be over 0 and at most 2 steps, got {self.reach}")
        if not 0 <= self.scale_reach <= 0.5:
            raise UserError(f"scale_reach must be from 0 to 0.5, got {self.scale_reach}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")


@dataclass(frozen=True)
class AWQSettings:
    """How AWQ runs.

    search: "convex" solves for the scales of least expected rounding error, "grid" tries the
        paper's curves.
    n_grid: ratios that the grid tries, and shares of the range that clipping tries.
    duo_scaling: whether the weights' own means take part in the grid's scales ("auto": whichever
        loses less).
    loss: what the grid compares. "hessian": the linears' output error through second moments;
        "output": the error of the attention's or MLP's output (of the linear's own where a linear
        feeds it) on `loss_rows` calibration rows.
    clip: whether ranges are searched after scaling, where the quantizer does not do so itself.
    """

    search: Literal["convex", "grid"] = "convex"
    n_grid: int = 20
    duo_scaling: Literal["auto", "on", "off"] = "auto"
    loss: Literal["hessian", "output"] = "hessian"
    loss_rows: int = 8
    clip: bool = True

    def __post_init__(self) -> None:
        one_of("search", self.search, ("convex", "grid"))
        at_least_one("n_grid", self.n_grid)
        one_of("duo_scaling", self.duo_scaling, ("auto", "on", "off"))
        one_of("loss", self.loss, ("hessian", "output"))
        at_least_one("loss_rows", self.loss_rows)


@dataclass(frozen=True)
class SmoothQuantSettings:
    """How SmoothQuant runs.

    alpha: share of the activations' range that moves into the weights; None: searched for each
        input.
    search: how, without an alpha. "convex" solves for the scales of least expected rounding error,
        "grid" tries alphas and compares the linears' outputs.
    through_linears: whether the inputs of o_proj and down_proj are smoothed too, where v_proj and
        up_proj can take their scales; otherwise only inputs that a norm makes.
    """

    alpha: float | None = None
    search: Literal["convex", "grid"] = "convex"
    through_linears: bool = True

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise UserError(f"alpha must be from 0 to 1, got {self.alpha}")
        one_of("search", self.search, ("convex", "grid"))


@dataclass(frozen=True)
class RotateSettings:
    """Which rotations are fused.

    r1: of the residual stream. r2: of the value heads, another one in each layer.
    kind: "hadamard" takes Hadamard matrices with random signs, "random" orthogonal matrices drawn
        uniformly.
    seed: from 0 to 2**32 - 1.
    """

    r1: bool = True
    r2: bool = True
    kind: Literal["hadamard", "random"] = "hadamard"
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("hadamard", "random"))
        if not self.r1 and not self.r2:
            raise UserError("a rotation with neither r1 nor r2 does nothing; turn one of them on")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")


@dataclass(frozen=True)
class KVCacheSettings:
    """How the cache is stored.

    format: the name of one (quantize/kv_names.py).
    skip_layers: decoder layers, counted from 0, whose keys and values stay as they are computed.
    scale_search: how calibrated scales are chosen, where the format has them: "minmax" takes the
        range of what was observed, "mse" the share of it with the least squared error.
    """

    format: str = "int8"
    skip_layers: tuple[int, ...] = ()
    scale_search: Literal["minmax", "mse"] = "mse"

    def __post_init__(self) -> None:
        one_of("scale_search", self.scale_search, ("minmax", "mse"))
        kv_spec_from_name(self.format, self.skip_layers)

    @property
    def spec(self) -> KVSpec:
        """The format by name, without the skipped layers."""
        return kv_spec_from_name(self.format, self.skip_layers)


def at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} must be at least 1, got {value}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """UserError when `value` is none of the known, with the nearest of them."""
    if value not in known:
        hint = did_you_mean(value, known)
        raise UserError(f"unknown {name} '{value}'{hint} (known: {', '.join(known)})")


@dataclass(frozen=True)
class BudgetSettings:
    """How bits are given out. bits: the mean per weight, scales and zero-points counted.
    num_bits, group_sizes: what each linear's scheme is chosen from. samples: calibration rows on
    which sensitivity is measured."""

    bits: float = 4.0
    num_bits: tuple[int, ...] = (2, 3, 4, 5, 6, 8)
    group_sizes: tuple[int, ...] = (32, 64, 128)
    samples: int = 16

    def __post_init__(self) -> None:
        if not 1 < self.bits <= 16:
            raise UserError(f"a budget is over 1 and at most 16 bits per weight, got {self.bits:g}")
        at_least_one("budget samples", self.samples)
        for name, values in (("num_bits", self.num_bits), ("group_sizes", self.group_sizes)):
            if not values:
                raise UserError(f"a budget needs at least one of {name} to choose from")
        wrong = [b for b in self.num_bits if not 2 <= b <= 8]
        if wrong:
            raise UserError(f"a budget's num_bits are from 2 to 8, got {wrong[0]}")
        for size in self.group_sizes:
            at_least_one("group_sizes", size)
