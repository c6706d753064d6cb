"""Logs: one record, one line, with the request it belongs to."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from pathlib import Path

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
    logging.getLogger("tandem.test").warning("no block: %s", "a\n2026 INFO \x1b[31mforged")
    line, other = capsys.readouterr().err.splitlines()
    assert line.endswith(r"ended error='a\n2026 INFO forged' replayed_tokens=3")
    assert other.endswith(r"tandem.test: 'no block: a\n2026 INFO \x1b[31mforged'")


ROOT = Path(__file__).resolve().parents[2]


def test_every_field_that_is_logged_is_written() -> None:
    """What isn't among FIELDS is dropped in silence."""
    logged = set[str]()
    for folder in ("orchestrator", "tandem", "draft_service", "target_service"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            for node in ast.walk(ast.parse(text if "extra=" in text else "")):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    logged |= _logged_by(node)
    assert logged >= {"request_id", "config_version", "sampling_changes"}
    assert logged <= set(telemetry.FIELDS)


def _logged_by(function: ast.AST) -> set[str]:
    """The fields of its calls with `extra`, which is a dict or the name of one."""
    nodes = list(ast.walk(function))
    named = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    extras = [
        word.value for node in nodes if isinstance(node, ast.Call) for word in node.keywords if word.arg == "extra"
    ]
    fields = set()
    for extra in extras:
        found = named[extra.id] if isinstance(extra, ast.Name) else extra
        assert isinstance(found, ast.Dict), ast.unparse(found)
        fields |= {ast.literal_eval(key) for key in found.keys if key is not None}
    return fields
