"""The committed tokens of every request, in Redis: the only place where tokens become real.

A session is two keys with one hash tag: `tandem:{<request id>}:state`, a hash, and `tandem:{<request id>}:tokens`, a
string with the token at position p in the bytes 4 * p to 4 * p + 3. Everything that changes a session is one Lua
script, which first compares what the caller believes (its ownership, the epoch, the length) with what is stored.

An ownership is named by a fence, which rises with each take-over, and by a claim, random bytes. The claim tells apart
two sessions with the same id and fence, such as before and after an eviction, and lets a script recognise a retry.

Any Redis from 7.0 or Valkey will do: one primary, named by its address or by Sentinels, or a Redis Cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import urlsplit

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tandem.transport_security import ClientFiles
from tandem.wire import TOKEN_BYTES

from .redis_nodes import Nodes
from .redis_pools import check_url, is_encrypted, make_nodes
from .redis_scripts import Acknowledgement, Patience, Script, ScriptPipeline, StoreError, StoreFull, StoreUnavailable
from .redis_tls import tls_settings

__all__ = [
    "AlreadyExists",
    "AlreadyFinished",
    "ChangedTooSoon",
    "ConfigChanged",
    "Durability",
    "EpochConflict",
    "FencedOff",
    "Ownership",
    "SessionStatus",
    "SessionStore",
    "Snapshot",
    "StateLost",
    "StoreConfig",
    "StoreCounters",
    "StoreError",
    "StoreFull",
    "StoreObserver",
    "StoreScripts",
    "StoreUnavailable",
    "Stored",
    "Update",
]

_CLAIM_BYTES = 16


@dataclass(frozen=True, slots=True)
class Stored:
    """What the server holds where it differs from what the caller believed."""

    fence: int
    epoch: int
    length: int


class _StateMismatch(StoreError):
    def __init__(self, message: str, stored: Stored) -> None:
        super().__init__(f"{message} (stored: fence {stored.fence}, epoch {stored.epoch}, length {stored.length})")
        self.stored = stored


class AlreadyExists(_StateMismatch):
    """The request id is taken; `request_fingerprint` tells whether by the same request."""

    def __init__(self, stored: Stored, request_fingerprint: bytes) -> None:
        super().__init__("the request id is taken", stored)
        self.request_fingerprint = request_fingerprint


class FencedOff(_StateMismatch):
    """Another owner has the session; this one must stop at once."""


class EpochConflict(_StateMismatch):
    """The owner is right but the epoch, the length or the status is not.

    A stored epoch below the caller's means that the server went back in time: a failover to a replica that lagged,
    or a restart from a file that did.
    """


class ConfigChanged(_StateMismatch):
    """The session's config is another one since: what was made under the one before can't be committed, and `reread` has the new
    one. Of an update: another one came first."""


class ChangedTooSoon(_StateMismatch):
    """No token was committed since the session's config was last replaced, so it can't be replaced yet."""


class AlreadyFinished(_StateMismatch):
    """No more tokens can come."""


class StateLost(_StateMismatch):
    """The session, or a part of it, is not there: expired, evicted, deleted, or never created."""


@dataclass(frozen=True, slots=True)
class Durability:
    """What has to hold a commit before it counts: the primary's disk, and so many replicas. Without either, its memory."""

    disk: bool = False
    replicas: int = 0

    @classmethod
    def parse(cls, text: str) -> Durability:
        """`memory`, `disk`, `replicas=N` or `disk+replicas=N`; raises ValueError for anything else."""
        parts = text.strip().lower().split("+")
        replicas = [part.removeprefix("replicas=") for part in parts if part.startswith("replicas=")]
        rest = [part for part in parts if not part.startswith("replicas=")]
        if len(replicas) > 1 or rest not in (["memory"], ["disk"], []) or not (rest or replicas):
            raise ValueError(text)
        if not all(number.isdecimal() for number in replicas):
            raise ValueError(text)
        return cls(disk=rest == ["disk"], replicas=int(replicas[0]) if replicas else 0)

    def wait(self, seconds: float) -> Acknowledgement | None:
        """What to send behind a commit; None where its own reply says all."""
        if not self.disk and not self.replicas:
            return None
        return Acknowledgement(int(self.disk), self.replicas, seconds)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where the store is and how patient to be with it. Raises ValueError for values that can't work.

    User name, password and database number are taken from the URL. The query of one that names a single server can set
    what isn't set here, such as `ssl_*`; one that names several hosts can't have a query.
    """

    url: str = field(repr=False)  # may hold a password
    tls: ClientFiles = field(default_factory=ClientFiles)
    """For rediss://; its CA takes the place of the system's. Read again for new connections when the files change."""
    socket_timeout: float = 1.0
    """Seconds for one exchange, from taking a connection to the last reply."""
    connect_timeout: float = 1.0
    pool_size: int = 16
    health_check_interval: float = 15.0
    """A connection that was idle for so many seconds is tried with a PING before use."""
    running_ttl: float = 900.0
    """Seconds until a running session expires; each commit starts them anew."""
    finished_ttl: float = 300.0
    retry_seconds: float = 3.0
    """Seconds after which a failed exchange is not repeated any more."""
    retry_attempts: int = 6
    durability: Durability = field(default_factory=Durability)
    client_name: str = "tandem-orchestrator"

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.tls.ca and not is_encrypted(self.url):
            raise ValueError("a CA for the store needs an address that begins with rediss")
        for name in ("socket_timeout", "connect_timeout", "running_ttl", "finished_ttl"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds")
        if self.pool_size < 1 or self.retry_attempts < 1:
            raise ValueError("pool_size and retry_attempts must be at least 1")
        if self.retry_seconds < 0 or self.health_check_interval < 0:
            raise ValueError("retry_seconds and health_check_interval must not be negative")


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right to commit to a session, and the epoch and length at which it was given."""

    request_id: str
    fence: int
    claim: bytes = field(repr=False)
    epoch: int
    length: int
    keys: tuple[bytes, bytes] = field(repr=False)
    config_version: int = 0
    """Of the config that commits are made under."""
    config_tag: bytes = field(default=b"", repr=False)
    """Names the change that brought that config: after a failover another one may have its number."""


class SessionStatus(StrEnum):
    """Whether more tokens can come."""

    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session at one instant. `tokens` is the prompt and the committed tokens, as `wire.encode_ids` writes them."""

    request_id: str
    fence: int
    epoch: int
    length: int
    prompt_length: int
    status: SessionStatus
    request_fingerprint: bytes = field(repr=False)
    config: bytes = field(repr=False)
    finish: bytes | None = field(repr=False)
    tokens: bytes = field(repr=False)
    owner: str
    ownership: Ownership | None
    """Set by `take_over` and `reread` for a session that is still running."""
    config_version: int
    """How many times the config was replaced."""
    config_length: int
    """The session's length when this config came into force."""


@dataclass(frozen=True, slots=True)
class Update:
    """A config that is in force: its number, the session's length when it came, and whether the call that is answered brought it."""

    config_version: int
    config_length: int
    took_effect: bool


class StoreObserver(Protocol):
    """Is told what happens, for metrics; called on the event loop, so it must not block."""

    def committed(self, seconds: float) -> None:
        """A commit succeeded, retries included, in so much time."""

    def retried(self, problem: str) -> None:
        """An exchange failed and is repeated."""

    def refused(self, error: StoreError) -> None:
        """A call ends with this error."""


class StoreCounters:
    """The observer that just counts."""

    def __init__(self) -> None:
        self.commits = 0
        self.commit_seconds = 0.0
        self.retries = 0
        self.refusals: dict[str, int] = {}

    def committed(self, seconds: float) -> None:
        """Counts and adds up."""
        self.commits += 1
        self.commit_seconds += seconds

    def retried(self, problem: str) -> None:  # noqa: ARG002
        """Counts."""
        self.retries += 1

    def refused(self, error: StoreError) -> None:
        """Counts by class."""
        name = type(error).__name__
        self.refusals[name] = self.refusals.get(name, 0) + 1


@dataclass(frozen=True, slots=True)
class StoreScripts:
    """The scripts of the protocol; tests replace some to see that faults in them are found."""

    create: Script
    commit: Script
    take_over: Script
    read: Script
    finish: Script
    delete: Script
    abandon: Script
    update: Script
    probe: Script

    @classmethod
    def load(cls) -> StoreScripts:
        """The scripts of this package."""
        return cls(**{name: Script.load(name) for name in cls.__slots__})


class SessionStore:
    """The sessions on one server. Use it from one event loop; any number of calls may be under way at once.

    Every method raises StoreUnavailable if the server can't be reached, doesn't answer in time, or refuses (a replica,
    still loading, wrong password). The call may have taken effect then, and repeating it with the same arguments is
    safe. The store has repeated it already, on fresh connections, for as long as its config says.
    """

    def __init__(
        self, pipeline: ScriptPipeline, config: StoreConfig, observer: StoreObserver, scripts: StoreScripts
    ) -> None:
        self._pipeline = pipeline
        self._observer = observer
        self._scripts = scripts
        self._running_ttl = _milliseconds(config.running_ttl)
        self._finished_ttl = _milliseconds(config.finished_ttl)
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls, config: StoreConfig, observer: StoreObserver | None = None, scripts: StoreScripts | None = None
    ) -> SessionStore:
        """A store for this server. Connections are made when needed: `ping` tells whether they can be."""
        if observer is None:
            observer = StoreCounters()
        patience = Patience(config.socket_timeout, config.retry_attempts, config.retry_seconds)
        pipeline = ScriptPipeline(
            _nodes(config), patience, observer.retried, config.durability.wait(config.socket_timeout)
        )
        return cls(pipeline, config, observer, scripts or StoreScripts.load())

    @property
    def observer(self) -> StoreObserver:
        """The observer given to `connect`, else a StoreCounters."""
        return self._observer

    async def close(self) -> None:
        """Waits for the calls under way and closes the connections. Later calls raise StoreUnavailable."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._pipeline.close()

    async def ping(self) -> None:
        """Returns if a commit would be accepted now, by each primary. Raises StoreUnavailable or StoreFull; it doesn't
        retry."""
        await self._pipeline.run_everywhere(self._scripts.probe)

    async def create(
        self, request_id: str, request_fingerprint: bytes, config: bytes, prompt_token_ids: bytes, owner: str
    ) -> Ownership:
        """Stores a new session with the encoded prompt and makes `owner` its owner. `config` is opaque.

        A cancelled create is undone. Raises AlreadyExists if the id is taken, StoreFull, StoreUnavailable.
        """
        claim = secrets.token_bytes(_CLAIM_BYTES)
        ownership = Ownership(request_id, 1, claim, 0, _token_count(prompt_token_ids), _keys(request_id))
        args = (claim, owner.encode(), request_fingerprint, config, prompt_token_ids, self._running_ttl)
        creation = asyncio.ensure_future(self._run(self._scripts.create, ownership.keys, args))
        try:
            reply = await asyncio.shield(creation)
        except asyncio.CancelledError:
            self._in_background(self._undo(creation, ownership))
            raise
        if not isinstance(reply, int):
            raise self._refused(AlreadyExists(Stored(*reply[1:4]), reply[4]))
        return ownership

    async def _undo(self, creation: asyncio.Future[Any], ownership: Ownership) -> None:
        # Only after its outcome: on another connection the deletion could come first.
        with contextlib.suppress(StoreError):
            if isinstance(await creation, int):
                await self.delete(ownership)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def commit(
        self,
        ownership: Ownership,
        epoch: int,
        length: int,
        new_tokens: bytes,
        on_retry: Callable[[str], None] | None = None,
    ) -> None:
        """Appends encoded tokens to the session, which has to be at this epoch and length, and adds one to its epoch.

        Returns only once they are stored; a commit that turns out to have been stored by an earlier attempt is a
        success. `on_retry` is told why, each time it is repeated. Raises FencedOff, ConfigChanged, EpochConflict, StateLost,
        StoreFull, StoreUnavailable.
        """
        started = time.perf_counter()
        if not _token_count(new_tokens):
            raise ValueError("a commit needs at least one token")
        args = (
            ownership.fence, ownership.claim, epoch, length, new_tokens, self._running_ttl, ownership.config_version,
            ownership.config_tag,
        )  # fmt: skip
        reply = await self._run(self._scripts.commit, ownership.keys, args, on_retry)
        self._check(reply)
        self._observer.committed(time.perf_counter() - started)

    async def take_over(self, request_id: str, owner: str) -> Snapshot:
        """Makes `owner` the owner of a running session, with a higher fence; a finished one is only returned.

        Raises StateLost if there is no such session, StoreFull, StoreUnavailable.
        """
        keys, claim = _keys(request_id), secrets.token_bytes(_CLAIM_BYTES)
        reply = await self._run(self._scripts.take_over, keys, (claim, owner.encode(), self._running_ttl))
        return self._snapshot(request_id, keys, reply, claim)

    async def read(self, request_id: str) -> Snapshot | None:
        """The session as it is now, or None if there is none.

        Raises StateLost if a part of it is missing, StoreUnavailable.
        """
        keys = _keys(request_id)
        reply = await self._run(self._scripts.read, keys, ())
        return None if reply == 0 else self._snapshot(request_id, keys, reply, None)

    async def reread(self, ownership: Ownership) -> Snapshot:
        """The session as it is now, for its owner, whose ownership comes anew, with the config in force.

        Raises FencedOff, StateLost, StoreUnavailable.
        """
        reply = await self._run(self._scripts.read, ownership.keys, ())
        if reply == 0:
            raise self._refused(StateLost("the session is not there", Stored(0, 0, 0)))
        snapshot = self._snapshot(ownership.request_id, ownership.keys, reply, ownership.claim)
        if snapshot.fence != ownership.fence or reply[12] != ownership.claim:
            stored = Stored(snapshot.fence, snapshot.epoch, snapshot.length)
            raise self._refused(FencedOff("another owner has the session", stored))
        return snapshot

    async def update(self, before: Snapshot, config: bytes) -> Update:
        """Replaces the config of a running session, whoever owns it, where it still is the one of `before`. Tokens that are
        committed stay; whatever was made under the config before can't be committed any more, and the epoch rises. With the config of
        `before` itself nothing changes; what is told of it lasts as a change does.

        Raises ConfigChanged, ChangedTooSoon, AlreadyFinished, StateLost, StoreFull, StoreUnavailable.
        """
        args = (before.config_version, before.config, config, secrets.token_bytes(_CLAIM_BYTES))
        reply = await self._run(self._scripts.update, _keys(before.request_id), args)
        if not isinstance(reply[0], int):
            raise self._refused(_mismatch(reply))
        return Update(reply[1], reply[2], took_effect=reply[0] == 1)

    async def finish(self, ownership: Ownership, epoch: int, finish: bytes) -> None:
        """Marks the session, which has to be at this epoch, as finished with an opaque result. Works on a full server.

        Raises FencedOff, ConfigChanged, EpochConflict, StateLost, StoreUnavailable.
        """
        version, tag = ownership.config_version, ownership.config_tag
        args = (ownership.fence, ownership.claim, epoch, finish, self._finished_ttl, version, tag)
        self._check(await self._run(self._scripts.finish, ownership.keys, args))

    async def delete(self, ownership: Ownership) -> None:
        """Removes the session, if it is still there. Works on a full server. Raises FencedOff, StoreUnavailable."""
        self._check(await self._run(self._scripts.delete, ownership.keys, (ownership.fence, ownership.claim)))

    async def abandon(self, ownership: Ownership, seconds: float) -> None:
        """Lets a running session expire after so many seconds, unless somebody takes it over. Works on a full server.

        Raises FencedOff, StoreUnavailable.
        """
        args = (ownership.fence, ownership.claim, _milliseconds(seconds))
        self._check(await self._run(self._scripts.abandon, ownership.keys, args))

    async def _run(
        self,
        script: Script,
        keys: tuple[bytes, bytes],
        args: tuple[bytes | int, ...],
        on_retry: Callable[[str], None] | None = None,
    ) -> Any:
        try:
            return await self._pipeline.run(script, keys, args, on_retry=on_retry)
        except StoreError as error:
            self._observer.refused(error)
            raise

    def _check(self, reply: Any) -> None:
        """Raises what a script's refusal stands for; an integer is a success."""
        if not isinstance(reply, int):
            raise self._refused(_mismatch(reply))

    def _refused(self, error: StoreError) -> StoreError:
        self._observer.refused(error)
        return error

    def _snapshot(self, request_id: str, keys: tuple[bytes, bytes], reply: list[Any], claim: bytes | None) -> Snapshot:
        if reply[0] == b"lost":
            raise self._refused(_mismatch(reply))
        fence, epoch, length, prompt_length = map(int, reply[:4])
        status = SessionStatus(reply[4].decode())
        config_version, ownership = int(reply[10] or 0), None
        if claim is not None and status is SessionStatus.RUNNING:
            ownership = Ownership(request_id, fence, claim, epoch, length, keys, config_version, reply[13] or b"")
        return Snapshot(
            request_id=request_id,
            fence=fence,
            epoch=epoch,
            length=length,
            prompt_length=prompt_length,
            status=status,
            request_fingerprint=reply[5],
            config=reply[6],
            finish=reply[7],
            tokens=reply[8] or b"",
            owner=reply[9].decode(),
            ownership=ownership,
            config_version=config_version,
            config_length=int(reply[11] or prompt_length),
        )


def _nodes(config: StoreConfig) -> Nodes:
    settings: dict[str, Any] = {
        # One timeout around the whole exchange does the same work for a third of the time that one per reply takes.
        "socket_timeout": None,
        "socket_connect_timeout": config.connect_timeout,
        "health_check_interval": config.health_check_interval,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "decode_responses": False,
        "client_name": config.client_name,
        # RESP3 and CLIENT SETINFO would add round trips to each new connection and refusals in the logs of a 7.0.
        "protocol": 2,
        "driver_info": None,
    }
    if is_encrypted(config.url):
        settings.update(tls_settings(config.tls))
    if urlsplit(config.url).scheme != "unix":
        settings["socket_keepalive"] = True
    return make_nodes(config.url, settings, config.pool_size, config.socket_timeout)


def _keys(request_id: str) -> tuple[bytes, bytes]:
    if not request_id:
        raise ValueError("a request id can't be empty")
    # The hash tag ends at the first closing brace; an empty tag would put the two keys apart.
    tag = request_id.encode().replace(b"%", b"%25").replace(b"}", b"%7D")
    return b"tandem:{%b}:state" % tag, b"tandem:{%b}:tokens" % tag


def _token_count(encoded: bytes) -> int:
    count, rest = divmod(len(encoded), TOKEN_BYTES)
    if rest:
        raise ValueError(f"{len(encoded)} bytes are not a whole number of tokens")
    return count


def _mismatch(reply: list[Any]) -> StoreError:
    stored = Stored(*reply[1:4])
    if reply[0] == b"fenced":
        return FencedOff("another owner has the session", stored)
    if reply[0] == b"changed":
        return ConfigChanged("the session has another config", stored)
    if reply[0] == b"early":
        return ChangedTooSoon("no token was committed since the last change", stored)
    if reply[0] == b"finished":
        return AlreadyFinished("the session is finished", stored)
    if reply[0] == b"conflict":
        return EpochConflict("the session is not where its owner believes", stored)
    return StateLost("the session is not there", stored)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
