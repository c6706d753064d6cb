"""Statements that hold unless this code is wrong. A violation fails one item and empties its session's cache."""

from __future__ import annotations


class InvariantError(Exception):
    """A statement about a session or a result that must hold doesn't."""


def require(condition: bool, statement: str) -> None:
    """Raises InvariantError, with the statement, if it doesn't hold."""
    if not condition:
        raise InvariantError(statement)
