"""What the wire alone costs here: bytes sent over a gRPC stream to another process and back, nothing done with them.

A round crosses such a stream twice, and the caller's once, so its time can't fall below that; absolute times of two
machines compare only in units of it.
"""

from __future__ import annotations

import time
from typing import Any

import grpc.aio

from .statistic import quantile

ECHO_BYTES = 200
ECHOES = 1000
WARM_UP = 100


async def echo(requests: Any, context: Any) -> None:
    """The other side: sends back what comes."""
    async for message in requests:
        await context.write(message)


async def measure_echo(channel: grpc.aio.Channel, method: str) -> float:
    """The median round trip in milliseconds."""
    call: Any = channel.stream_stream(method)()
    message, times = bytes(ECHO_BYTES), []
    for _ in range(WARM_UP + ECHOES):
        started = time.perf_counter()
        await call.write(message)
        await call.read()
        times.append(time.perf_counter() - started)
    await call.done_writing()
    return 1000 * quantile(times[WARM_UP:], 0.5)
