"""`quantize doctor`: what this machine computes with, and which kernels would run a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from .common import print_json, terminal
from .common_options import AsJson

if TYPE_CHECKING:
    from ..kernel_choices import KernelChoice


def doctor(
    ops: Annotated[
        Path | None,
        typer.Option("--ops", help="Say which kernel runs each op of this checkpoint, and why."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="For that: auto, cpu or cuda, which need not be here.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Of activations.")] = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Print versions and devices; with --ops, the kernels that would run a checkpoint and why.

    Example: quantize doctor --ops ./smollm2-w4 --device cuda
    """
    facts = _machine()
    rows = [] if ops is None else _choices(ops, device, dtype)
    if as_json:
        print_json({"machine": facts, "ops": [row._asdict() for row in rows]})
        return
    from rich.table import Table

    shown = Table("this machine", "")
    for name, value in facts.items():
        shown.add_row(name, str(value))
    terminal().print(shown)
    if ops is not None:
        terminal().print(_table(ops, rows))


def _machine() -> dict[str, Any]:
    import importlib.util
    from importlib.metadata import version

    import torch

    has_triton = importlib.util.find_spec("triton") is not None
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "triton": version("triton") if has_triton else "not installed: no GPU kernels",
        "gpu": torch.cuda.get_device_name() if cuda else "none that torch sees",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _choices(folder: Path, device: str, dtype: str) -> list[KernelChoice]:
    import torch

    from ..checkpoint.load import Checkpoint
    from ..kernel_choices import kernel_choices

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device must be auto, cpu or cuda, not '{device}'")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise UserError(f"--dtype must be bfloat16, float16 or float32, not '{dtype}'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    opened = Checkpoint(folder)
    if not opened.schemes:
        raise UserError(f"{folder} has no quantized linears; --ops takes a quantized checkpoint")
    return kernel_choices(opened, getattr(torch, dtype), torch.device(device))


def _table(folder: Path, rows: list[KernelChoice]) -> Any:
    from rich.table import Table

    table = Table("op", "how many", "kernel", "passed over", title=str(folder))
    for row in rows:
        reasons = "\n".join(f"{name}: {reason}" for name, reason in row.declined.items())
        kernel = row.kernel or "none"
        table.add_row(row.op, str(row.count), f"{kernel}\n{row.note}".strip(), reasons)
    return table
