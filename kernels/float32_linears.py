"""float32 linears on a CPU by oneDNN, where they are faster than torch's choice.

torch computes them by MKL, which keeps to 256-bit instructions on other makers' CPUs: oneDNN takes
half the time on an AMD Zen 5 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from .plain_linear import has_fast_float32, onednn_linear


def float32_linears() -> AbstractContextManager[Any]:
    """A context in which float32 linears on a CPU that need no gradient are computed the faster
    way; what they give differs by float32 rounding only."""
    return _OneDNNLinears() if has_fast_float32() else nullcontext()


class _OneDNNLinears(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and not torch.is_grad_enabled():
            x, weight = args[:2]
            bias = args[2] if len(args) > 2 else None
            if _takes(x) and _takes(weight) and weight.ndim == 2:
                return onednn_linear(x, weight, bias)
        return func(*args, **(kwargs or {}))


def _takes(t: Tensor) -> bool:
    return t.dtype == torch.float32 and t.device.type == "cpu" and t.layout == torch.strided
