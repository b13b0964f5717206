"""Which kernel runs each op of a checkpoint on a device, and why those before it do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..kernels.attention_ops import AttentionProblem, choose_attention
from ..kernels.dispatch import Choice
from ..kernels.errors import UserError
from ..kernels.kv_store_ops import StoreProblem, choose_store
from ..kernels.norm_ops import NormProblem, choose_norm
from ..kernels.paged_kv import PoolForm
from .checkpoint.load import Checkpoint
from .planning.runtimes import lowbit_answer, runs_as_tape

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
    """Quantized linears, one row for all of one scheme and shape; then attention, the store, norms.

    `device` need not be there: nothing is computed.
    """
    kinds: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for module, scheme in checkpoint.schemes.items():
        kinds.setdefault((str(scheme), checkpoint.shape(module)), []).append(module)
    rows = []
    for (_, shape), modules in kinds.items():
        scheme = checkpoint.schemes[modules[0]]
        taped = runs_as_tape(str(checkpoint.config.get("model_type")), device)
        answer = lowbit_answer(modules[0], scheme, shape, dtype, device, taped)
        name = f"{modules[0].rpartition('.')[2]} {shape[0]} x {shape[1]}"
        kernel = answer.runs[0] if answer.runs else ""
        rows.append(KernelChoice(name, len(modules), kernel, answer.declined, answer.note))
    return [*rows, *_attention(checkpoint, dtype, device), *_norms(checkpoint, dtype, device)]


def _attention(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> list[KernelChoice]:
    """Paged attention, and the store of what it reads, over keys and values that are not quantized;
    nothing where the config does not say how many heads there are."""
    config = checkpoint.config
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    hidden = config.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int)):
        return []
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    form = PoolForm(None, kv_heads or heads, head_dim or hidden // heads, BLOCK_SIZE, dtype)
    attended = AttentionProblem(form, form, heads, dtype, device.type)
    stored = StoreProblem(form, form, dtype, device.type)
    shape = f"{form.kv_heads} of {form.head_dim}"
    return [
        _choice(f"attention, {heads} heads over {shape}", layers, choose_attention, attended),
        _choice(f"rotate and store keys and values, {shape}", layers, choose_store, stored),
    ]


def _norms(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> list[KernelChoice]:
    """RMS norms and gated activations; nothing where the config does not say how wide they are."""
    config = checkpoint.config
    layers = config.get("num_hidden_layers")
    widths = {"rms_norm": config.get("hidden_size"), "gated_mul": config.get("intermediate_size")}
    if not isinstance(layers, int):
        return []
    return [
        _choice(f"{op} of {width}", layers * (2 if op == "rms_norm" else 1), choose_norm,
                NormProblem(op, width, dtype, device.type))
        for op, width in widths.items()
        if isinstance(width, int)
    ]  # fmt: skip


def _choice(
    name: str, count: int, choose: Callable[[Any], Choice[Any]], problem: object
) -> KernelChoice:
    try:
        choice = choose(problem)
    except UserError as e:
        return KernelChoice(name, count, "", {"all": str(e)})
    return KernelChoice(name, count, choice.candidate.name, choice.declined)
