"""One target under fuzz: tries inputs, counts them, notes what fails and where."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from .fuzz_targets import TARGETS, Workplace
from .mutations import Choose

SLOWEST = 30  # seconds that an input may take
MEMORY = 8 << 30  # bytes of address space beyond what is mapped at the start


class Fault(NamedTuple):
    """What a reader did that it may not: the exception and where in lowbit it came from."""

    target: str
    error: str
    place: str


class TooSlow(Exception):
    """An input took longer than SLOWEST seconds."""


class Fuzzer:
    """The target `name`. faults: how many inputs led to each. keep: a folder for the first input of
    each; timed: whether an alarm ends an input that takes too long."""

    def __init__(
        self,
        name: str,
        sources: Path,
        scratch: Path,
        keep: Path | None = None,
        timed: bool = True,
    ) -> None:
        self.name, self._keep, self._timed = name, keep, timed
        self._workplace = Workplace(TARGETS[name], sources, scratch)
        self.inputs = 0
        self.faults: Counter[Fault] = Counter()

    def try_one(self, choose: Choose) -> None:
        """Raises what a reader raised beside UserError, after it has been noted."""
        data = self._workplace.damaged(choose)
        self.inputs += 1
        try:
            with _limited(SLOWEST if self._timed else 0):
                self._workplace.read(data)
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a panic of tokenizers is no Exception
            self._note(Fault(self.name, f"{type(e).__name__}: {str(e)[:200]}", _place(e)), data)
            raise

    def facts(self) -> dict[str, Any]:
        """As plain JSON values."""
        faults = [{**fault._asdict(), "inputs": n} for fault, n in self.faults.items()]
        return {"inputs": self.inputs, "faults": faults}

    def _note(self, fault: Fault, data: bytes) -> None:
        if not self.faults[fault] and self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            name = f"{self.name}-{os.getpid()}-{len(self.faults)}".replace(" ", "-")
            (self._keep / name).write_bytes(data)
        self.faults[fault] += 1


def limit_memory() -> None:
    """Let this process allocate MEMORY more than it has: a MemoryError beyond is a fault."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, most))


def quiet() -> None:
    """No bars and no warnings: a thousand damaged models give as many."""
    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("ignore")
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def _place(e: BaseException) -> str:
    """The last line of lowbit's own in the traceback."""
    root = str(Path(__file__).parents[1])
    own = [f for f in traceback.extract_tb(e.__traceback__) if f.filename.startswith(root)]
    return f"{Path(own[-1].filename).relative_to(root)}:{own[-1].lineno}" if own else "elsewhere"


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """TooSlow inside the context once so many seconds are over; 0: never."""
    if not seconds:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
