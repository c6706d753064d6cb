"""A stand-in for the orchestrator with scripted answers, so that the command line is tested without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.v1 import orchestrator_pb2 as pb
from tandem.v1 import orchestrator_pb2_grpc


def token(token_id: int, kind: str, text: str) -> pb.GeneratedToken:
    return pb.GeneratedToken(token_id=token_id, kind=pb.TokenKind.Value(f"TOKEN_KIND_{kind}"), text=text)


def answer() -> list[pb.GenerateResponse]:
    """Two rounds of gamma 2: one wholly accepted, one rejected at its second position; the last text is held back."""
    return [
        pb.GenerateResponse(
            start=pb.GenerationStart(request_id="r-1", seed=7, prompt_tokens=5, model="fake"),
            tokens=[token(1, "ACCEPTED", "The"), token(2, "ACCEPTED", " sky"), token(3, "BONUS", " is")],
            text="The sky is",
        ),
        pb.GenerateResponse(tokens=[token(4, "ACCEPTED", "\n"), token(5, "RECOVERED", "blue")], text="\nblue"),
        pb.GenerateResponse(
            text=".",
            finish=pb.GenerationFinish(
                reason=pb.FINISH_REASON_STOP,
                usage=pb.Usage(prompt_tokens=5, completion_tokens=5),
                speculation=pb.SpeculationStats(
                    rounds=2,
                    draft_tokens=4,
                    accepted_tokens=3,
                    draft_tokens_per_position=[2, 2],
                    accepted_tokens_per_position=[2, 1],
                    expected_accepted_tokens=2.9,
                    mean_acceptance_length=2.5,
                    time_to_first_token_seconds=0.1,
                    total_seconds=0.2,
                ),
            ),
        ),
    ]


class FakeOrchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Answers with a script; keeps the requests it got."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.updates: list[pb.UpdateSamplingRequest] = []
        self.responses: Sequence[pb.GenerateResponse] = answer()
        self.error: status_pb2.Status | None = None
        self.pause_seconds = 0.0
        self.cancelled = 0
        self.address = ""
        self._over = False
        self._pauses: set[threading.Event] = set()

    def fail(self, code: int, message: str, *details: object) -> None:
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        self.error = status_pb2.Status(code=code, message=message, details=packed)

    def fail_invalid(self) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field="top_p", description="must be in (0, 1]")
        self.fail(
            code_pb2.INVALID_ARGUMENT,
            "the request is not valid",
            error_details_pb2.ErrorInfo(reason="BAD_FIELD", domain="tandem"),
            error_details_pb2.BadRequest(field_violations=[violation]),
        )

    def Generate(self, request, context):
        answered, gone = threading.Event(), threading.Event()
        self._pauses.add(gone)
        ended = self._ended(answered, gone)
        if not context.add_callback(ended):
            ended()  # it was cancelled before it got here
        # Whoever sees the request may cancel it at once.
        self.requests.append(request)
        if self.error is not None:
            answered.set()
            context.abort_with_status(rpc_status.to_status(self.error))
        for response in self.responses:
            yield response
            # A warm-up asks for a few tokens and isn't what a test waits for.
            if request.max_tokens != 4 and not self._over:
                gone.wait(self.pause_seconds)
        answered.set()

    def UpdateSampling(self, request, context):
        self.updates.append(request)
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(self.error))
        return pb.UpdateSamplingResponse(config_version=2, completion_tokens=17)

    def release(self) -> None:
        """Ends every pause, so that no thread outlives its test."""
        self._over = True
        for pause in tuple(self._pauses):
            pause.set()

    def _ended(self, answered: threading.Event, gone: threading.Event) -> Callable[[], None]:
        def callback() -> None:
            self.cancelled += not answered.is_set()
            self._pauses.discard(gone)
            gone.set()

        return callback
