"""Whether a service is ready, asked of the service itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.cli.interruptions import Interruptions
from tandem.cli.plan import Endpoint
from tandem.grpc_server import NOTE_KEY, REFUSAL_KEY
from tandem.transport_security import ClientFiles

# Short, for who asks again: a service that loads a model may hold its port without answering.
PROBE_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Ready without a reason, else in a few words why not; `final` if waiting won't help. `note` is what one that is ready says of itself."""

    reason: str = ""
    final: bool = False
    note: str = ""


READY = Answer()
Probe = Callable[[], Answer]
"""Asks once."""


@contextmanager
def open_probe(endpoint: Endpoint, interruptions: Interruptions, seconds: float = PROBE_SECONDS) -> Iterator[Probe]:
    """A probe that keeps its connections while it is asked again and again; `seconds` is how long an answer is waited for.
    To be opened, used and closed in a hold: what interrupts it ends an answer early."""
    with ExitStack() as connections:
        probes = [_open(endpoint, address, interruptions, seconds, connections) for address in endpoint.addresses]

        def probe_any() -> Answer:
            answers = []
            for probe in probes:
                answer = probe()
                if not answer.reason:
                    return answer
                answers.append(answer)
            return answers[0]

        yield probe_any


def _open(
    endpoint: Endpoint, address: str, interruptions: Interruptions, seconds: float, connections: ExitStack
) -> Probe:
    if endpoint.kind == "redis":
        return _redis_probe(address, endpoint.tls, interruptions, seconds, connections)
    return _grpc_probe(address, endpoint.tls, interruptions, seconds, connections)


def _redis_probe(
    url: str, tls: ClientFiles, interruptions: Interruptions, seconds: float, connections: ExitStack
) -> Probe:
    names = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    client = redis.Redis.from_url(
        url,
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        retry=None,
        **{name: file for name, file in names.items() if file},
    )
    connections.callback(client.close)

    def probe() -> Answer:
        try:
            with interruptions.released():
                client.ping()
        except redis.BusyLoadingError:
            return Answer("loading")
        except redis.AuthenticationError:
            return Answer("refuses the password")
        except (redis.RedisError, OSError):
            return Answer("connecting")
        return READY

    return probe


def _grpc_probe(
    address: str, tls: ClientFiles, interruptions: Interruptions, seconds: float, connections: ExitStack
) -> Probe:
    # The default back-off grows to two minutes; a service that was just started deserves more attention.
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    credentials = tls.credentials()
    channel = connections.enter_context(
        grpc.insecure_channel(address, options=options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=options)
    )
    stub = health_pb2_grpc.HealthStub(channel)

    def probe() -> Answer:
        request = health_pb2.HealthCheckRequest(service="")
        call = stub.Check.future(request, timeout=seconds)  # type: ignore[attr-defined]  # set in its __init__
        try:
            with interruptions.cancelling(call.cancel):
                reply = call.result()
        except grpc.FutureCancelledError:
            return Answer("interrupted")
        except grpc.RpcError as error:
            return Answer(_reason(error))
        return _answer(reply.status == health_pb2.HealthCheckResponse.SERVING, dict(call.trailing_metadata() or ()))

    return probe


def _answer(serving: bool, said: Mapping[str, bytes]) -> Answer:
    """A service that serves, but without a part that it was started with and refuses, isn't what was asked for."""
    refusal, note = (said.get(key, b"").decode(errors="replace") for key in (REFUSAL_KEY, NOTE_KEY))
    if refusal:
        return Answer(refusal, final=True)
    if serving:
        return Answer(note=note)
    return Answer(f"not ready: {note}" if note else "loading")


def _reason(error: Any) -> str:
    code, details = error.code(), (error.details() or "").lower()
    if "handshake" in details or "certificate" in details:
        return "connecting; TLS fails"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return "connecting"
    return f"health check fails with {code.name}"
