"""Channels to services that tests stop, kill and start again: each has connections of its own, and a call waits for its server.

By itself gRPC shares a connection between all channels of a process to one address, and with it the time that it leaves a server
alone that didn't answer: a call of one test would fail at once since a server was down in the test before, on a new channel as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

Options = Sequence[tuple[str, Any]]

OWN_CONNECTIONS: Options = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # By itself it would try less and less often, once in two minutes in the end.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_WAITS: Options = (("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "waitForReady": True}]})),)


def open_channel(
    address: str,
    options: Options = (),
    credentials: grpc.ChannelCredentials | None = None,
    *,
    patient: bool = True,
) -> grpc.Channel:
    """Its calls wait for a connection until their deadline, unless it isn't `patient`: then they fail where there is none."""
    chosen = _chosen(options, patient)
    if credentials is None:
        return grpc.insecure_channel(address, options=chosen)
    return grpc.secure_channel(address, credentials, options=chosen)


def open_async_channel(address: str, options: Options = ()) -> grpc.aio.Channel:
    """The same for an event loop."""
    return grpc.aio.insecure_channel(address, options=_chosen(options, patient=True))


def _chosen(options: Options, patient: bool) -> list[tuple[str, Any]]:
    return list({**dict(OWN_CONNECTIONS), **dict(_WAITS if patient else ()), **dict(options)}.items())
