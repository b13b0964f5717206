"""Worker processes of `gpu_check`: jobs handed out, rows taken as they come, the dead replaced."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Job = dict[str, Any]
Row = dict[str, Any]
GRACE = 20.0  # seconds
COMMAND = (sys.executable, "-m", f"{__package__}.gpu_worker")


class Worker:
    """One process, started when there is a job for it and again after it has died."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def do(self, job: Job, deadline: float, on_row: Callable[[Row], None]) -> str | None:
        """Have `job` done by `deadline` (of time.monotonic); None, or what went wrong."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except OSError:
            return self._died()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                return "no answer in time"
            if line is None:
                return self._died()
            answer = json.loads(line)
            if "row" in answer:
                on_row(answer["row"])
                continue
            if not answer["usable"]:
                self.close()
            return answer["fault"]

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._lines = queue.SimpleQueue()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            threading.Thread(
                target=_read, args=(self._process.stdout, self._lines), daemon=True
            ).start()
        return self._process

    def _died(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        return f"its process ended with {code}"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _read(stream: Any, lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def do_all(
    jobs: Sequence[Job],
    workers: Sequence[Worker],
    deadline: float,
    job_seconds: float,
    on_row: Callable[[Job, Row], None],
    on_end: Callable[[Job, str | None], None],
) -> None:
    """All jobs in order, each by the next worker that is free, for `job_seconds` at most; none is
    begun after `deadline`, nor waited for longer than GRACE after it. on_row, on_end: called by one
    thread at a time."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    lock = threading.Lock()

    def row_of(job: Job, row: Row) -> None:
        with lock:
            on_row(job, row)

    def work(worker: Worker) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            now = time.monotonic()
            if now > deadline:
                fault: str | None = "left out: no time"
            else:
                end = min(now + job_seconds, deadline + GRACE)
                fault = worker.do(job, end, lambda row, job=job: row_of(job, row))
            with lock:
                on_end(job, fault)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
