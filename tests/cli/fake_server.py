"""What a service without a model serves; see `fake_service`."""

from __future__ import annotations

import argparse
import os
import signal
import time
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.grpc_server import REFUSAL_KEY
from tandem.v1 import orchestrator_pb2_grpc
from tests.cli.fake_orchestrator import FakeOrchestrator


class RefusingHealth(health.HealthServicer):
    """Waits for nothing that could still come."""

    def Check(self, request, context):
        context.set_trailing_metadata(((REFUSAL_KEY, b"the draft speaks another language"),))
        return super().Check(request, context)


def serve(arguments: argparse.Namespace) -> None:
    """Until SIGTERM, or as the mode has it."""
    # A plain list: a handler that sets a threading.Event waits for ever where it interrupts that event's own wait.
    stopped: list[int] = []
    ignore = arguments.mode == "ignores-sigterm"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else lambda number, _: stopped.append(number))
    server = grpc.server(futures.ThreadPoolExecutor(8))
    servicer = RefusingHealth() if arguments.mode == "refuses" else health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    orchestrator = FakeOrchestrator()
    orchestrator.pause_seconds = arguments.pause
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(orchestrator, server)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_insecure_port(arguments.listen)
    server.start()
    time.sleep(0.3)
    if arguments.mode == "dies":
        os._exit(1)
    if arguments.mode not in ("never-ready", "refuses"):
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    while not stopped:
        time.sleep(0.05)
    orchestrator.release()
    server.stop(0).wait()
    print("stopped in order", flush=True)
