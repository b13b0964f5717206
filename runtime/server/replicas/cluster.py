"""The machines that replicas run on, and what each replica gets of them."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from ....kernels.errors import UserError

CONNECT_SECONDS = 5.0
OBJECT_STORE = 256 << 20  # bytes: requests and answers pass through it, models do not
GIB = 1 << 30
_ROUTERS = (  # the same class: the public name cannot be imported where there is no vLLM
    "ray.serve.llm.request_router",
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
)
_ROUTER = "PrefixCacheAffinityRouter"
BALANCED = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"


class Machine(NamedTuple):
    """cores, gpus: that Ray may give away; memory: bytes."""

    cores: int
    gpus: int
    memory: int


class Share(NamedTuple):
    """Of one replica: CPU threads, GPUs, and bytes of memory at least."""

    threads: int
    gpus: int
    memory: int


def check_ray() -> None:
    try:
        importlib.import_module("ray.serve")
    except ImportError as e:
        raise UserError(f"--replicas needs Ray Serve ({e}): pip install 'lowbit[ray]'") from e


def check_address(address: str) -> None:
    """UserError where nobody answers there: Ray itself tries for many minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as e:
        raise UserError(
            f"no Ray cluster answers at '{address}' ({e}): start one with 'ray start --head' and "
            "give HOST:PORT as it prints it, or 'auto' on a machine of the cluster"
        ) from e


def connect(address: str | None) -> list[Machine]:
    """This process becomes a part of the cluster at `address`, or of a new one on this machine
    alone. UserError where there is none."""
    import ray

    if address is not None:
        check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves them beside other work
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init(
                address="local", include_dashboard=False, object_store_memory=OBJECT_STORE,
                num_cpus=_cores(), **options,
            )  # fmt: skip
        else:
            ray.init(address=address, **options)
    except Exception as e:  # of that very class, where a process of Ray does not come up in time
        told = str(e).partition("\n")[0]
        raise UserError(
            f"Ray cannot be started or reached here ({told}): start a cluster with 'ray start "
            "--head' and give the address that it prints with --ray-address"
        ) from e
    return [
        Machine(int(r.get("CPU", 0)), int(r.get("GPU", 0)), int(r.get("memory", 0)))
        for r in (node["Resources"] for node in ray.nodes() if node["Alive"])
    ]


def share_of(replicas: int, machines: Sequence[Machine], gpus: int, memory: int) -> Share:
    """What each of so many replicas gets: as many threads as all of them can have alike. gpus,
    memory: that one takes. UserError where the machines have less."""

    def fit(threads: int) -> int:
        return sum(
            min(m.cores // threads, m.memory // max(1, memory), m.gpus // gpus if gpus else m.cores)
            for m in machines
        )

    if fit(1) < replicas:
        cores, all_gpus = sum(m.cores for m in machines), sum(m.gpus for m in machines)
        told = ", ".join(f"{m.memory / GIB:.1f} GiB" for m in machines)
        raise UserError(
            f"{replicas} replicas need a core{f', {gpus} GPU' if gpus else ''} and "
            f"{memory / GIB:.1f} GiB of memory each, and {len(machines)} machine(s) with {cores} "
            f"cores, {all_gpus} GPUs and {told} of memory have room for {fit(1)}: ask for fewer "
            "with --replicas, or add machines with 'ray start' and give --ray-address"
        )
    most = max(m.cores for m in machines)
    threads = max(t for t in range(1, most + 1) if fit(t) >= replicas)
    return Share(threads, gpus, memory)


def prefix_router() -> str | None:
    """Where Ray's router that knows prefixes is imported from; None: this Ray has none."""
    for module in _ROUTERS:
        try:
            if hasattr(importlib.import_module(module), _ROUTER):
                return f"{module}:{_ROUTER}"
        except ImportError:
            continue
    return None


def _cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
