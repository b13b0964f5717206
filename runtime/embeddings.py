"""A text as one vector, from a model that was made to write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import UserError


@torch.inference_mode()
def mean_pooled(model: Any, token_ids: list[int], device: torch.device) -> Tensor:
    """float32 [hidden size] on the CPU, of length one: the mean of the hidden states after the last
    layer and its norm. UserError where they are not finite."""
    tokens = torch.tensor([token_ids], device=device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    mean = hidden.float().mean(dim=0)
    if not torch.isfinite(mean).all():
        raise UserError(
            f"the model's hidden states are not finite in {hidden.dtype}: try dtype float32"
        )
    return torch.nn.functional.normalize(mean, dim=0).cpu()
