"""Logs: one record, one line, with the request it belongs to."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from tandem import telemetry


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure_logging("draft", "INFO", "json")
    logger = logging.getLogger("tandem.test")
    logger.debug("not this")
    logger.warning("%d \n lines", 2, extra={"request_id": "a", "cache_epoch": 0, "other": "not this"})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    warning, failed = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert warning.pop("time").endswith("Z")
    assert warning == {
        "level": "WARNING",
        "service": "draft",
        "logger": "tandem.test",
        "message": "2 \n lines",
        "request_id": "a",
        "cache_epoch": 0,
    }
    assert "ValueError: broken" in failed["exception"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure_logging("target", "WARNING", "text")
    logging.getLogger("tandem.test").info("not this")
    logging.getLogger("tandem.test").error("it failed", extra={"request_id": "a", "cache_epoch": 3})
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("ERROR   target tandem.test: it failed request_id=a cache_epoch=3")


def test_text_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure_logging("target", "INFO", "text")
    logging.getLogger("tandem.test").info("ended", extra={"error": "a\n2026 INFO forged", "replayed_tokens": 3})
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(r"ended error='a\n2026 INFO forged' replayed_tokens=3")
