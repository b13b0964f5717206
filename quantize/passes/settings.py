"""How each pass runs: small frozen configs. Free of torch, for the command line shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...kernels.errors import UserError

MAX_DAMP = 1.0  # share of the mean diagonal beyond which a Hessian is hopeless


@dataclass(frozen=True)
class GPTQSettings:
    """How GPTQ runs.

    dampening_frac: share of the mean of H's diagonal that is added to it, over 0.
    block_size: columns between two lazy updates.
    act_order: "static" processes columns in falling order of H's diagonal, "none" in memory order.
    static_groups: scales fixed before from the original weights; otherwise each group's are chosen
        from the current, error-compensated weights when its first column is reached.
    scale_search: "hessian" minimizes squared error weighted by H's diagonal, "minmax" takes the
        plain range.
    """

    dampening_frac: float = 0.01
    block_size: int = 64
    act_order: Literal["static", "none"] = "static"
    static_groups: bool = True
    scale_search: Literal["hessian", "minmax"] = "hessian"

    def __post_init__(self) -> None:
        if not 0 < self.dampening_frac <= MAX_DAMP:
            raise UserError(
                f"dampening_frac must be over 0 and at most {MAX_DAMP}, got {self.dampening_frac}"
            )
        if self.block_size < 1:
            raise UserError(f"block_size must be at least 1, got {self.block_size}")
        if self.act_order not in ("static", "none"):
            raise UserError(f"act_order must be 'static' or 'none', got '{self.act_order}'")
        if self.scale_search not in ("hessian", "minmax"):
            raise UserError(
                f"scale_search must be 'hessian' or 'minmax', got '{self.scale_search}'"
            )
        if self.act_order == "static" and not self.static_groups:
            raise UserError(
                "act_order 'static' needs static_groups: columns of several groups are "
                "interleaved, so a group's scale must be known before its first column"
            )
