"""`python -m bench.span_sink HOST:PORT`: an OTLP collector that takes spans and forgets them."""

from __future__ import annotations

import sys
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class SpanSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes everything."""

    def Export(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Of OTLP."""
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> int:
    """Serves until it is terminated."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(SpanSink(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    server.wait_for_termination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
