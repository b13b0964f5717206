"""Options of `quantize serve` for several replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...kernels.errors import UserError

if TYPE_CHECKING:
    from ...runtime import LLM
    from ...runtime.server.settings import ServerSettings

_PANEL = "Replicas"

Replicas = Annotated[
    int | None,
    typer.Option(
        help="Engines behind this address, each in a process of its own, by Ray Serve.",
        rich_help_panel=_PANEL,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        help="Of a Ray cluster whose machines they run on, as ray start --head prints it.",
        rich_help_panel=_PANEL,
    ),
]


def check_replicas(replicas: int | None, ray_address: str | None, device: str) -> None:
    if replicas is None:
        if ray_address is not None:
            raise UserError("--ray-address is for replicas: say how many with --replicas")
        return
    if replicas < 1:
        raise UserError(f"--replicas must be at least 1, got {replicas}")
    if device.startswith("cuda:"):
        raise UserError(
            f"--device {device} is one GPU, and each replica gets one of its own: give --device "
            "cuda"
        )


def run_server(
    settings: ServerSettings,
    load: Callable[[], LLM],
    replicas: int | None,
    ray_address: str | None,
    *,
    folder: Path,
    device: str,
    kv_memory: int | None,
    max_num_seqs: int,
) -> None:
    """Serve with one engine, or with replicas where they are asked for."""
    if replicas is None:
        from ...runtime.server.run import serve

        serve(settings, load)
        return
    from ...kernels.device import resolve_device
    from ...runtime.server.replicas.run import Replication, serve_replicas

    gpus = int(resolve_device(device).type == "cuda")
    memory = 0 if gpus else _file_bytes(folder) + (kv_memory or 0)
    told = Replication(replicas, ray_address, gpus, memory, max_num_seqs)
    serve_replicas(settings, load, told)


def _file_bytes(folder: Path) -> int:
    """Of a model's weights: what it takes in memory at least."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
