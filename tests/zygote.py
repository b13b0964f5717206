"""A process that has torch imported and forks a child for each `quantize` command that it is sent.

Every command thus runs in a process of its own, with real exit codes and signals, without paying
for the imports anew. Protocol, one JSON object a line: in {args, cwd, stdout, stderr, kill_at,
before}, out {"code": n}, negative when a signal ended the child, as subprocess has it.

before: code that the child runs first.

kill_at [module, function or Class.method, n]: SIGKILL itself when that is called for the n-th time.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

PRELOAD = (
    "torch", "transformers", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "rich.console", "rich.table",
    "lowbit.quantize.runner", "lowbit.runtime", "lowbit.evals.size", "lowbit.quantize.gguf.export",
)  # fmt: skip


def serve() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    _answer({"ready": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(request)
        _, status = os.waitpid(pid, 0)
        _answer({"code": os.waitstatus_to_exitcode(status)})


def _answer(value: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _run(request: dict[str, Any]) -> None:
    """Be the command, and never return."""
    os.chdir(request["cwd"])
    for fd, path in enumerate(("/dev/null", request["stdout"], request["stderr"])):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, flags, 0o600), fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["quantize", *request["args"]]
    code = 1
    try:
        exec(request["before"], {})
        if request["kill_at"]:
            kill_at(*request["kill_at"])
        from lowbit.quantize.cli import main

        main()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def kill_at(module: str, name: str, nth: int) -> None:
    """Make the n-th call of `module`'s function or method the process's last deed."""
    owner: Any = importlib.import_module(module)
    *path, leaf = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, leaf)
    calls = 0

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, leaf, counted)


if __name__ == "__main__":
    serve()
