"""Logs for machines: one JSON object a line, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LOGGER = logging.getLogger("lowbit.server")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def log(
    event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any
) -> None:
    """fields: members of the line's object. error: its traceback goes with it."""
    LOGGER.log(level, event, exc_info=error, extra={"fields": fields})


def set_up_logs() -> None:
    """For a process that is nothing but a server: warnings of uvicorn, Ray and OpenTelemetry come
    in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (
        ("lowbit.server", logging.INFO), ("uvicorn", logging.WARNING), ("ray", logging.WARNING),
        ("ray.serve", logging.WARNING), ("opentelemetry", logging.WARNING),
    ):  # fmt: skip
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
