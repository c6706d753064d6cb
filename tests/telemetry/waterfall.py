"""`python -m tests.telemetry.waterfall` prints the examples of docs/observability.md: a healthy request, and one whose draft
stops answering in the middle."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tandem.cli.waterfall import draw, roots
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.channels import open_channel
from tests.support.generation import gather, request
from tests.support.services import MODELS, ServiceProcess, running_stack
from tests.telemetry.collector import Collector, Span, running_collector
from tests.telemetry.test_traces import Metadata, count, new_trace

PROMPT = "def read_lines(path):\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, running_collector() as (collector, endpoint):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        environment["TANDEM_DRAFT_TIMEOUT_SECONDS"] = "0.2"
        pair = (MODELS / "tiny-target", MODELS / "tiny-draft")
        with (
            running_stack(Path(folder), *pair, environment) as stack,
            open_channel(stack.orchestrator.address) as channel,
        ):
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            _run(stub, collector, new_trace())
            _print(_run(stub, collector, new_trace()))
            with _stopped(stack.draft):
                _print(_run(stub, collector, new_trace()))


def _print(spans: list[Span]) -> None:
    [root] = roots(spans)
    print("\n".join(draw(root, spans)), end="\n\n")


@contextlib.contextmanager
def _stopped(service: ServiceProcess) -> Iterator[None]:
    service.signal(signal.SIGSTOP)
    resume = threading.Timer(3.0, service.signal, (signal.SIGCONT,))
    resume.start()
    try:
        yield
    finally:
        resume.join()


def _run(
    stub: orchestrator_pb2_grpc.OrchestratorServiceStub, collector: Collector, trace: tuple[str, Metadata]
) -> list[Span]:
    trace_id, metadata = trace
    sent = request(PROMPT, temperature=0.8, seed=3, max_tokens=10, num_speculative_tokens=4)
    result = gather(stub.Generate(sent, metadata=metadata, timeout=60))
    rounds = result.speculation.rounds
    return collector.wait(
        trace_id, lambda spans: count(spans)["generate"] == 1 and count(spans)["target.verify"] >= rounds
    )


if __name__ == "__main__":
    main()
