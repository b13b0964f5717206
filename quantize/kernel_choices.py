"""Which kernel runs each op of a checkpoint on a device, and why those before it do not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.attention_ops import AttentionProblem, choose_attention
from ..kernels.errors import UserError
from ..kernels.paged_kv import PoolForm
from .checkpoint.load import Checkpoint
from .planning.runtimes import lowbit_answer

BLOCK_SIZE = 16


class KernelChoice(NamedTuple):
    """One kind of op: what it is, how many there are, who runs it ("" for nobody), who declined."""

    op: str
    count: int
    kernel: str
    declined: dict[str, str]
    note: str = ""


def kernel_choices(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> list[KernelChoice]:
    """Quantized linears, one row for all of one scheme and shape; then paged attention.

    `device` need not be there: nothing is computed.
    """
    kinds: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for module, scheme in checkpoint.schemes.items():
        kinds.setdefault((str(scheme), checkpoint.shape(module)), []).append(module)
    rows = []
    for (_, shape), modules in kinds.items():
        scheme = checkpoint.schemes[modules[0]]
        answer = lowbit_answer(modules[0], scheme, shape, dtype, device)
        name = f"{modules[0].rpartition('.')[2]} {shape[0]} x {shape[1]}"
        kernel = answer.runs[0] if answer.runs else ""
        rows.append(KernelChoice(name, len(modules), kernel, answer.declined, answer.note))
    attention = _attention(checkpoint, dtype, device)
    return [*rows, attention] if attention is not None else rows


def _attention(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> KernelChoice | None:
    """Paged attention over keys and values that are not quantized; None where the config does not
    say how many heads there are."""
    config = checkpoint.config
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    hidden = config.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int)):
        return None
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    form = PoolForm(None, kv_heads or heads, head_dim or hidden // heads, BLOCK_SIZE, dtype)
    problem = AttentionProblem(form, form, heads, dtype, device.type)
    name = f"attention, {heads} heads over {form.kv_heads} of {form.head_dim}"
    try:
        choice = choose_attention(problem)
    except UserError as e:
        return KernelChoice(name, layers, "", {"attention": str(e)})
    return KernelChoice(name, layers, choice.candidate.name, choice.declined)
