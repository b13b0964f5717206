"""The `quantize` command: its entry, which imports nothing slow before it can be interrupted."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 and the signal's number, as shells have it


def main() -> None:
    """Run the command line. Exit codes: 2 for input that cannot be used, 130 for Ctrl-C, 141 where
    the reader of a pipe has gone, 1 for a fault of lowbit's own, which alone shows a traceback."""
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _said("interrupted", INTERRUPTED)
    except BrokenPipeError:
        code = CLOSED_PIPE
    if code == CLOSED_PIPE:  # what is still in the buffer goes nowhere, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run() -> int:
    """The exit code of the command in sys.argv."""
    handled = signal.getsignal(signal.SIGINT)
    if handled is signal.default_int_handler:  # an import may swallow a KeyboardInterrupt
        signal.signal(signal.SIGINT, _end)
    from ...kernels.errors import UserError
    from ..checkpoint.files import explained
    from .app import Interrupted, PipeClosed, app

    signal.signal(signal.SIGINT, handled)
    try:
        app(prog_name="quantize")
    except UserError as e:
        return _said(str(e), 2)
    except Interrupted:
        return _said("interrupted", INTERRUPTED)
    except PipeClosed:
        return CLOSED_PIPE
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0
    except OSError as e:
        said = explained(e)
        return _fault() if said is None else _said(said, 2)
    except Exception:
        return _fault()
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: nothing has been begun."""
    os.write(2, b"quantize: interrupted\n")
    os._exit(INTERRUPTED)


def _fault() -> int:
    import traceback

    traceback.print_exc()
    told = "this is a fault of lowbit, not of your input: please report it with the lines above"
    return _said(told, 1)


def _said(message: str, code: int) -> int:
    sys.stderr.write(f"quantize: {message}\n")
    return code
