"""Draws traces as text. `python -m tests.telemetry.waterfall` prints the examples of docs/observability.md: a healthy
request, and one whose draft stops answering in the middle."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from tandem.v1 import orchestrator_pb2_grpc
from tests.support.generation import gather, request
from tests.support.services import MODELS, ServiceProcess, running_stack
from tests.telemetry.collector import Collector, Span, running_collector
from tests.telemetry.test_traces import Metadata, count, new_trace

WIDTH = 44
PROMPT = "def read_lines(path):\n"
SHOWN = {
    "generate": ("gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons"),
    "tandem.round": ("tandem.gamma", "tandem.accepted", "tandem.expected_acceptance", "tandem.degraded_reason"),
    "draft.propose": ("tandem.steps", "tandem.batch_size", "tandem.prefill_tokens"),
    "target.verify": ("tandem.batch_size", "tandem.prefill_tokens"),
}


def draw(spans: Sequence[Span]) -> Iterator[str]:
    """One line per span, children below their parents, bars to scale."""
    [root] = [span for span in spans if span.name == "generate"]
    begin = root.start_ns
    length = max(span.end_ns for span in spans) - begin
    for depth, span in _walk(root, spans, 0):
        start = round((span.start_ns - begin) / length * WIDTH)
        width = max(1, round((span.end_ns - span.start_ns) / length * WIDTH))
        bar = (" " * min(start, WIDTH - 1) + "█" * width)[:WIDTH]
        label = "  " * depth + span.name
        yield f"{label:<18}|{bar:<{WIDTH}}| {(span.end_ns - span.start_ns) / 1e6:8.1f} ms  {_details(span)}".rstrip()


def _walk(span: Span, spans: Sequence[Span], depth: int) -> Iterator[tuple[int, Span]]:
    yield depth, span
    children = (each for each in spans if each.parent_id == span.span_id)
    for child in sorted(children, key=lambda each: each.start_ns):
        yield from _walk(child, spans, depth + 1)


def _details(span: Span) -> str:
    shown = [
        f"{key.rpartition('.')[2]}={_short(span.attributes[key])}"
        for key in SHOWN.get(span.name, ())
        if key in span.attributes
    ]
    return " ".join(shown + [f"({name.removeprefix('tandem.')})" for name, _ in span.events if "first" not in name])


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return ",".join(value) if isinstance(value, list) else str(value)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, running_collector() as (collector, endpoint):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        environment["TANDEM_DRAFT_TIMEOUT_SECONDS"] = "0.2"
        pair = (MODELS / "tiny-target", MODELS / "tiny-draft")
        with (
            running_stack(Path(folder), *pair, environment) as stack,
            grpc.insecure_channel(stack.orchestrator.address) as channel,
        ):
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            _run(stub, collector, new_trace())
            print("\n".join(draw(_run(stub, collector, new_trace()))), end="\n\n")
            with _stopped(stack.draft):
                print("\n".join(draw(_run(stub, collector, new_trace()))))


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
