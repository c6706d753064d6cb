"""Structured logging for all services: text for people, JSON lines for machines.

A record may carry the fields of `FIELDS` (`extra={"request_id": …}`); token ids and text never belong in a log.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

REQUEST_FIELDS = (
    "status",
    "error",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "replayed_tokens",
    "rounds",
    "draft_tokens",
    "accepted_tokens",
    "expected_accepted_tokens",
    "rebuilds",
    "degraded",
    "shortened_rounds",
    "benched_drafts",
    "sampling_changes",
    "queue_seconds",
    "time_to_first_token_seconds",
    "total_seconds",
)
"""Of the one line at the end of a request."""
FIELDS = ("request_id", "trace_id", "cache_epoch", "config_version", "committed_tokens", *REQUEST_FIELDS)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "json")


def configure_logging(service: str, level: str, log_format: str) -> None:
    """Sends all logs to standard error, in one of FORMATS, at one of LEVELS and above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # These report each request, and each file of a model, at INFO.
    for chatty in ("httpx", "httpcore", "urllib3", "huggingface_hub", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


class JsonFormatter(logging.Formatter):
    """One JSON object on one line: time, level, service, logger, message, the fields, the exception."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _utc(record),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_fields(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`time level service logger: message field=value`, then the traceback if there is one."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_on_one_line(value)}" for name, value in _fields(record).items())
        message = _on_one_line(record.getMessage())  # which may hold a worker's own words
        line = f"{_utc(record)} {record.levelname:<7} {self._service} {record.name}: {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _on_one_line(value: object) -> str:
    """A line of the log is one line: what would break it comes as Python writes it."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


def _utc(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
