"""Pytest fixtures that run a test once per kind of server; the run ends with which kinds ran, and why others did not.

Use it by `pytest_plugins = ("tests.support.redis_fixtures",)` in a test module.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.redis_servers import RedisServer, ServerKind, kinds, missing

_ran: Counter[str] = Counter()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which servers the tests ran against."""
    terminalreporter.section("redis servers")
    for name, count in sorted(_ran.items()):
        terminalreporter.line(f"{name}: {count} tests")
    for reason in missing():
        terminalreporter.line(f"not run - {reason}")


@pytest.fixture(scope="session", params=kinds(), ids=str)
def redis_kind(request: pytest.FixtureRequest) -> ServerKind:
    """Each kind in turn."""
    kind: ServerKind = request.param
    return kind


@pytest.fixture(scope="session")
def _shared_server(redis_kind: ServerKind) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as directory:
        server = redis_kind.create(Path(directory))
        server.start()
        yield server
        server.close()


@pytest.fixture
def redis_server(redis_kind: ServerKind, _shared_server: RedisServer) -> Iterator[RedisServer]:
    """A running server, empty, a primary, without a memory limit; shared, so leave its process alone."""
    _ran[redis_kind.name] += 1
    yield _shared_server
    _shared_server.command("REPLICAOF", "NO", "ONE")
    _shared_server.command("CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")
    _shared_server.command("FLUSHALL")


@pytest.fixture(scope="session")
def one_redis_server() -> Iterator[RedisServer]:
    """A running server of the first kind, for tests that are not about the server."""
    with tempfile.TemporaryDirectory() as directory:
        server = kinds()[0].create(Path(directory))
        server.start()
        yield server
        server.close()


@pytest.fixture
def make_redis_server(redis_kind: ServerKind, tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers of one's own, to be stopped, killed and paused at will; takes configuration directives."""
    _ran[redis_kind.name] += 1
    with contextlib.ExitStack() as stack:

        def make(options: Mapping[str, str] | None = None) -> RedisServer:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=tmp_path)))
            server = redis_kind.create(directory, options)
            stack.callback(server.close)
            server.start()
            return server

        yield make
