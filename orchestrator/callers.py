"""Who may call: bearer tokens out of a file, which is read again when it changes.

The file is TOML, one table for each caller; only the service's user should be able to read it:

    [callers.alice]
    token = "at least 16 characters"
    max_running_requests = 4

A token is compared by digest and in constant time with every caller's, so that the time of an answer tells nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .errors import InvalidArgument, Overloaded, Unauthenticated

log = logging.getLogger(__name__)

MIN_TOKEN_CHARACTERS = 16
RETRY_AFTER_SECONDS = 1.0
_SCHEME = "bearer "


class CallersFileError(ValueError):
    """The file of callers can't be used; the message doesn't repeat what it holds."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who is known, and how many of their requests may run or wait at once; 0: no limit of their own."""

    name: str
    digest: bytes = field(repr=False)
    max_running_requests: int = 0


class Callers:
    """The callers of one orchestrator. Without a file everybody may call, under no name."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._stamp: tuple[int, int, int] | None = None
        self._callers: tuple[Caller, ...] = ()
        self._running: Counter[str] = Counter()
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._callers = _read(self._path)

    @contextlib.contextmanager
    def admit(self, metadata: Iterable[tuple[str, str | bytes]], requests: int = 1) -> Iterator[str]:
        """The caller's name, for the time of one call, which may be for several completions and then counts as so many
        requests. Raises Unauthenticated, Overloaded, and InvalidArgument where the call alone is more than the limit."""
        if self._path is None:
            yield ""
            return
        self._refresh(self._path)
        caller = self._identify(metadata)
        most = caller.max_running_requests
        if 0 < most < requests:
            raise InvalidArgument("n", f"this caller may have {most} requests run or wait at once")
        if 0 < most < self._running[caller.name] + requests:
            raise Overloaded(
                f"{self._running[caller.name]} requests of this caller run or wait", "CALLER_LIMIT", RETRY_AFTER_SECONDS
            )
        self._running[caller.name] += requests
        try:
            yield caller.name
        finally:
            self._running[caller.name] -= requests
            if not self._running[caller.name]:
                del self._running[caller.name]

    def _identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        sent = [value for key, value in metadata if key == "authorization" and isinstance(value, str)]
        if len(sent) != 1 or not sent[0].lower().startswith(_SCHEME):
            raise Unauthenticated("send the metadata authorization: Bearer TOKEN", "TOKEN_MISSING")
        digest = _digest(sent[0][len(_SCHEME) :])
        found = None
        for caller in self._callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        if found is None:
            raise Unauthenticated("the token is not known", "TOKEN_UNKNOWN")
        return found

    def _refresh(self, path: Path) -> None:
        try:
            stamp = _stamp(path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._callers = _read(path)
            log.info("the file of callers has changed: %d callers", len(self._callers))
        except CallersFileError as error:
            log.error("the changed file of callers can't be used, the former one stays in force: %s", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # `_read` says what is wrong
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[Caller, ...]:
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise CallersFileError(f"can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        # Neither the message nor the cause: both may hold a part of the file.
        raise CallersFileError("is not TOML") from None
    callers = tables.get("callers")
    if set(tables) != {"callers"} or not isinstance(callers, dict) or not callers:
        raise CallersFileError("must hold tables [callers.NAME] and nothing else")
    known = tuple(_caller(name, table) for name, table in callers.items())
    if len({caller.digest for caller in known}) < len(known):
        raise CallersFileError("two callers have the same token")
    return known


def _caller(name: str, table: object) -> Caller:
    if not isinstance(table, dict) or not set(table) <= {"token", "max_running_requests"}:
        raise CallersFileError(f"callers.{name}: only token and max_running_requests can be set")
    token, limit = table.get("token"), table.get("max_running_requests", 0)
    if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARACTERS:
        raise CallersFileError(f"callers.{name}: token must have at least {MIN_TOKEN_CHARACTERS} characters")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise CallersFileError(f"callers.{name}: max_running_requests must be a whole number, 0 for no limit")
    return Caller(name, _digest(token), limit)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
