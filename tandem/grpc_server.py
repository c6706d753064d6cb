"""What every gRPC server here has: options, health, reflection, a port that is bound or reported, signals, draining."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.transport_security import ServerFiles

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
_PING_INTERVAL_MS = 5_000

_SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    # Two processes on one port would share its connections in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A client may ping each second, with or without a call; by default that ends its connection.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_INTERVAL_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Find peers that vanished without a word: their sessions hold cache slots. It is the ping's own timeout that counts:
    # grpc.keepalive_timeout_ms alone leaves it at a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)

_PROBE_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.so_reuseport", 0),
    # Nobody has to show who they are there: a question is some bytes, and a prober has one or two open.
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 8),
)

_PLAIN_TEXT = ServerFiles()

NOTE_KEY, REFUSAL_KEY = "tandem-note-bin", "tandem-refusal-bin"
"""Trailing metadata of a health check's answer, in UTF-8: what a status can't say, which is what is missing, or of a worker that serves
how long its context is; and what time won't mend."""
LIVENESS = "liveness"
"""The name under which health says whether the process is sound, which is all that a restart can mend."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_options(max_request_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Of a service's server; a larger message ends its call with RESOURCE_EXHAUSTED."""
    # Not as a second value behind another one: of two, gRPC takes the first.
    return [*_SERVER_OPTIONS, ("grpc.max_receive_message_length", max_request_bytes)]


class PortError(Exception):
    """The address can't be listened on; one line that says so."""


class _HealthServicer(health.aio.HealthServicer):
    """Says more than a status where there is more to say."""

    metadata: tuple[tuple[str, bytes], ...] = ()

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        if self.metadata:
            context.set_trailing_metadata(self.metadata)
        answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return answer


class HealthSwitch:
    """grpc.health.v1: readiness for the server as a whole ("") and its service, always alike; `LIVENESS` apart from it.

    A probe of liveness asks the event loop, so one that hangs is found by its silence.
    """

    def __init__(self, service: str) -> None:
        self._servicer = _HealthServicer()
        self._names = ("", service)
        self._apart: grpc.aio.Server | None = None
        self.serving = False

    async def attach(self, server: grpc.aio.Server) -> None:
        """Adds the health service: alive, NOT_SERVING."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._servicer.set(LIVENESS, SERVING)
        await self.set(serving=False)

    async def serve_apart(self, listen: str, variable: str) -> None:
        """Serves health, and nothing else, in plain text at host:port, for probes that speak no TLS; not at all if
        `listen` is empty. Raises PortError."""
        if not listen:
            return
        server = grpc.aio.server(options=_PROBE_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        _listen(server, listen, variable, None)
        await server.start()
        self._apart = server

    async def set(self, *, serving: bool, note: str = "", refusal: str = "") -> None:
        """Switches readiness. The note, and what is there and refused, is for everybody who may ask."""
        self.serving = serving
        said = {NOTE_KEY: note, REFUSAL_KEY: refusal}
        self._servicer.metadata = tuple((key, text.encode()) for key, text in said.items() if text)
        for name in self._names:
            await self._servicer.set(name, SERVING if serving else NOT_SERVING)

    async def set_dead(self) -> None:
        """Neither ready nor alive any more."""
        await self.set(serving=False)
        await self._servicer.set(LIVENESS, NOT_SERVING)

    async def close(self) -> None:
        """Ends what `serve_apart` began."""
        if self._apart is not None:
            await self._apart.stop(None)


def add_reflection(server: grpc.aio.Server, service: str) -> None:
    """Lets tools list and call the service without its .proto files."""
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def bind(server: grpc.aio.Server, address: str, variable: str, files: ServerFiles = _PLAIN_TEXT) -> int:
    """Binds host:port (port 0 takes a free one) and returns the port.

    Raises PortError that names the variable, ConfigError where the files can't be used.
    """
    credentials = files.credentials()
    port = _listen(server, address, variable, credentials)
    if credentials is None:
        warn_of_plain_text(address, variable)
    return port


def warn_of_plain_text(address: str, variable: str) -> None:
    """Says in the log that what listens there is open to other machines, if it is."""
    if not _is_loopback(address):
        log.warning(
            "%s: %s is open to other machines, in plain text: TANDEM_TLS_CERTIFICATE is not set", variable, address
        )


def _listen(server: grpc.aio.Server, address: str, variable: str, credentials: grpc.ServerCredentials | None) -> int:
    problem = f"{variable}: can't listen on {address!r}: the port is in use, or the address is not this machine's"
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise PortError(problem) from error
    if port == 0:
        raise PortError(problem)
    return port


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def run(main: Coroutine[Any, Any, int]) -> NoReturn:
    """Runs a service and ends the process with its exit status, before the event loop could cancel what still runs."""

    async def to_the_end() -> NoReturn:
        end_process(await main)

    uvloop.run(to_the_end())
    raise AssertionError("the process has ended")


def end_process(status: int) -> NoReturn:
    """Ends the process at once. Taking torch or transformers down in order costs a second of CPU or two, crashes where a
    model is still being loaded, and gives back nothing that the end of the process doesn't."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
