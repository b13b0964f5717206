"""What stands for the engine where replicas have it: from their start to their end."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ....kernels.errors import UserError
from ..errors import ApiError
from ..logs import log
from ..metrics import ServerMetrics
from ..settings import ServerSettings
from .cluster import BALANCED, Share, prefix_router
from .replica import Replica

if TYPE_CHECKING:
    from ...llm import LLM

State = Literal["loading", "ready", "draining", "dead"]
POLL_SECONDS = 0.5
TELL_SECONDS = 15.0  # between two lines of the log while replicas are started
HEALTH_SECONDS, HEALTH_TIMEOUT = 5.0, 60.0
MORE_ONGOING = 64  # requests of a replica beside those that run and wait: they are answered at once


class Look(NamedTuple):
    """running: replicas that take requests. failed: why Ray cannot have as many as it should."""

    running: int
    failed: str | None


class Front:
    """The same to its server as a Service is. settings: of the server; those of limits hold in each
    replica. max_num_seqs: of each replica's engine."""

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[], LLM],
        replicas: int,
        share: Share,
        max_num_seqs: int,
    ) -> None:
        self.settings, self.metrics = settings, ServerMetrics(settings.model_name)
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self.handle: Any = None
        self._load, self._replicas, self._share = load, replicas, share
        self._max_num_seqs = max_num_seqs
        self._name = f"lowbit-{uuid.uuid4().hex[:8]}"  # beside whatever else the cluster serves
        self._seen, self._when = Look(0, None), 0.0
        self._stop: Callable[[], None] = lambda: None

    def begin(self, stop: Callable[[], None]) -> None:
        """See Service.begin."""
        self._stop = stop
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._start, args=(loop,), name="lowbit-ray", daemon=True).start()

    def drain(self) -> None:
        """Take no more requests."""
        if self.state != "dead":
            self.state = "draining"

    def close(self) -> None:
        """End the replicas, and Ray where this process has started it."""
        import ray
        from ray import serve

        self.drain()
        if ray.is_initialized():
            if self.handle is not None:
                serve.delete(self._name)
            ray.shutdown()

    def ready(self) -> None:
        """ApiError where no request can be taken."""
        if self.state != "ready":
            why = {
                "loading": "the replicas are being started",
                "draining": "the server is about to end", "dead": "the replicas have ended",
            }[self.state]  # fmt: skip
            raise ApiError(503, why, code=self.state, retry_after=5)

    async def look(self) -> Look:
        """How the replicas are, or were a moment ago."""
        if time.monotonic() - self._when > POLL_SECONDS:
            self._when = time.monotonic()
            self._seen = await asyncio.to_thread(self._look)
        return self._seen

    def _look(self) -> Look:
        from ray import serve

        app = serve.status().applications.get(self._name)
        if app is None:
            return Look(0, None)
        told = list(app.deployments.values())
        running = sum(
            n for d in told for state, n in d.replica_states.items() if state == "RUNNING"
        )
        failed = app.status in ("DEPLOY_FAILED", "UNHEALTHY")
        return Look(running, "; ".join(d.message for d in told) if failed else None)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own."""
        started, told = time.perf_counter(), 0.0
        try:
            router = self._deploy()
            while True:
                seen = self._look()
                if seen.failed is not None:
                    log("a replica failed", logging.ERROR, traceback=seen.failed)
                    reason = seen.failed.strip().rpartition("\n")[2]
                    raise UserError(f"the replicas cannot be started: {reason}")
                if seen.running == self._replicas or self.state != "loading":
                    break
                waited = time.perf_counter() - started
                if waited > told + TELL_SECONDS:
                    told = waited
                    log(
                        "waiting for replicas", running=seen.running, replicas=self._replicas,
                        seconds=round(waited),
                    )  # fmt: skip
                time.sleep(POLL_SECONDS)
        except BaseException as e:
            error = e
            self._call(loop, lambda: self._fail(error))
            return
        seconds = round(time.perf_counter() - started, 2)
        self._call(loop, lambda: self._open(seconds, router))

    def _deploy(self) -> str:
        """Which router chooses among them."""
        from dataclasses import replace

        from ray import serve
        from ray.serve.config import ProxyLocation, RequestRouterConfig

        router = prefix_router()
        share, settings = self._share, self.settings
        serve.start(proxy_location=ProxyLocation.Disabled)
        deployment = serve.deployment(Replica).options(  # type: ignore[union-attr]
            name="replica",
            num_replicas=self._replicas,
            max_ongoing_requests=self._max_num_seqs + settings.max_queue + MORE_ONGOING,
            ray_actor_options={
                "num_cpus": share.threads, "num_gpus": share.gpus, "memory": share.memory,
            },
            user_config={"load": True},
            health_check_period_s=HEALTH_SECONDS,
            health_check_timeout_s=HEALTH_TIMEOUT,
            graceful_shutdown_timeout_s=settings.drain_timeout,
            max_constructor_retry_count=1,
            request_router_config=RequestRouterConfig(
                request_router_class=router or BALANCED,  # type: ignore[arg-type]
                request_router_kwargs=self._router_options() if router else {},
            ),
        )  # fmt: skip
        app = deployment.bind(replace(settings, api_keys=()), self._load, share.threads)
        target = serve.RunTarget(app, name=self._name, route_prefix=None)
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        self.handle = handle.options(stream=True)
        return (router or BALANCED).rpartition(":")[2]

    def _router_options(self) -> dict[str, Any]:
        """More requests than this between the busiest and the idlest replica, and prefixes count
        for nothing; texts of more letters than that are forgotten."""
        return {
            "imbalanced_threshold": max(1, self._max_num_seqs // 2),
            "do_eviction": True,
            "eviction_threshold_chars": 4_000_000,
            "eviction_target_chars": 3_000_000,
        }

    def _open(self, seconds: float, router: str) -> None:
        if self.state != "loading":
            return
        self.state = "ready"
        log(
            "ready", model=self.settings.model_name, seconds=seconds, replicas=self._replicas,
            threads=self._share.threads, gpus=self._share.gpus, router=router,
        )  # fmt: skip

    def _fail(self, error: BaseException) -> None:
        if self.state == "draining":
            return
        self.state, self.failure = "dead", error
        cause = None if isinstance(error, UserError) else error
        log("the model cannot be served", logging.CRITICAL, cause, reason=str(error))
        self._stop()

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(what)
        except RuntimeError:
            return  # the server has ended
