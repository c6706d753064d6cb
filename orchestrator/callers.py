"""Who may call: bearer tokens out of a file, which is read again when it changes.

The file is TOML, one table for each caller; only the service's user should be able to read it:

    [callers.alice]
    token = "at least 16 characters"
    max_running_requests = 4
    max_tokens_per_request = 2000
    max_tokens_per_minute = 60000

A token is compared by digest and in constant time with every caller's, so that the time of an answer tells nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .errors import InvalidArgument, Overloaded, Unauthenticated
from .token_budget import TokenBudget

log = logging.getLogger(__name__)

MIN_TOKEN_CHARACTERS = 16
RETRY_AFTER_SECONDS = 1.0
_SCHEME = "bearer "


class CallersFileError(ValueError):
    """The file of callers can't be used; the message doesn't repeat what it holds."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who is known, and what they may have of this orchestrator; 0: no limit of their own."""

    name: str = ""
    digest: bytes = field(default=b"", repr=False)
    max_running_requests: int = 0
    """That run or wait at once."""
    max_tokens_per_request: int = 0
    """Of a completion."""
    max_tokens_per_minute: int = 0
    """Of prompts and completions together."""


NOBODY = Caller()


class Callers:
    """The callers of one orchestrator. Without a file everybody may call, under no name."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._stamp: tuple[int, int, int] | None = None
        self._callers: tuple[Caller, ...] = ()
        self._running: Counter[str] = Counter()
        self._budgets: defaultdict[str, TokenBudget] = defaultdict(TokenBudget)
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._take(_read(self._path))

    def identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Who calls. Raises Unauthenticated."""
        if self._path is None:
            return NOBODY
        self._refresh(self._path)
        return self._known(metadata)

    @contextlib.contextmanager
    def admit(self, metadata: Iterable[tuple[str, str | bytes]], requests: int = 1) -> Iterator[Caller]:
        """The caller, for the time of one call, which may be for several completions and then counts as so many requests.
        Raises Unauthenticated, Overloaded, and InvalidArgument where the call alone is more than the limit."""
        caller = self.identify(metadata)
        most = caller.max_running_requests
        if 0 < most < requests:
            raise InvalidArgument("n", f"this caller may have {most} requests run or wait at once")
        if 0 < most < self._running[caller.name] + requests:
            raise Overloaded(
                f"{self._running[caller.name]} requests of this caller run or wait", "CALLER_LIMIT", RETRY_AFTER_SECONDS
            )
        self.check_budget(caller)
        self._running[caller.name] += requests
        try:
            yield caller
        finally:
            self._running[caller.name] -= requests
            if not self._running[caller.name]:
                del self._running[caller.name]

    def spend(self, caller: Caller, tokens: int) -> None:
        """So many tokens were used for this caller."""
        if caller.max_tokens_per_minute:
            self._budgets[caller.name].spend(tokens)

    def check_budget(self, caller: Caller) -> None:
        """Raises Overloaded where the caller has no token left."""
        if not caller.max_tokens_per_minute:
            return
        if seconds := self._budgets[caller.name].seconds_until_left():
            raise Overloaded(
                f"this caller has used its {caller.max_tokens_per_minute} tokens a minute", "CALLER_TOKENS", seconds
            )

    def _take(self, callers: tuple[Caller, ...]) -> None:
        self._callers = callers
        limited = {caller.name: caller.max_tokens_per_minute for caller in callers if caller.max_tokens_per_minute}
        for name, per_minute in limited.items():
            self._budgets[name].allow(per_minute)
        for name in set(self._budgets) - set(limited):
            del self._budgets[name]

    def _known(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
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
            self._take(_read(path))
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


_LIMITS = ("max_running_requests", "max_tokens_per_request", "max_tokens_per_minute")


def _caller(name: str, table: object) -> Caller:
    if not isinstance(table, dict) or not set(table) <= {"token", *_LIMITS}:
        raise CallersFileError(f"callers.{name}: only token, {', '.join(_LIMITS)} can be set")
    token, limits = table.get("token"), {limit: table.get(limit, 0) for limit in _LIMITS}
    if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARACTERS:
        raise CallersFileError(f"callers.{name}: token must have at least {MIN_TOKEN_CHARACTERS} characters")
    for limit, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CallersFileError(f"callers.{name}: {limit} must be a whole number, 0 for no limit")
    return Caller(name, _digest(token), **limits)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
