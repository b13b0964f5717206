"""The device that a name means."""

from __future__ import annotations

import textwrap

import torch

from .errors import UserError


def resolve_device(name: str | torch.device) -> torch.device:
    """The torch device that `name` means; "auto" is a CUDA or ROCm device where there is one.

    UserError when this machine cannot compute on it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # what is on meta has no value
    except (RuntimeError, AssertionError, ImportError) as e:
        reason = textwrap.shorten(str(e), 100, placeholder=" ...")
        raise UserError(
            f"device '{name}' cannot be used here; use auto, cpu, cuda or cuda:N ({reason})"
        ) from e
    return device
