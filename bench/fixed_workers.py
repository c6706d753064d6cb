"""`python -m bench.fixed_workers`: a draft and a target over real gRPC whose answers were made in advance.

They answer within the same turn of the event loop, so what is left of a round is orchestrator, wire and commit. The
time they take nevertheless is measured here and read, and set to zero, by the call TIMINGS_METHOD.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio

from tandem import grpc_server
from tandem.model_info import token_strings, vocabulary_fingerprint
from tandem.sampling_limits import SAMPLING_VERSION
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2

from .echo import echo
from .fixed_answers import FixedAnswers

TIMINGS_SERVICE = "tandem.bench.FixedWorkers"
TIMINGS_METHOD = f"/{TIMINGS_SERVICE}/Timings"
ECHO_METHOD = f"/{TIMINGS_SERVICE}/Echo"
CONTEXT_LENGTH = 1 << 16
TOKEN_BYTES = 4


@dataclass(slots=True)
class Timings:
    """Since the last reading: batches and items answered, seconds spent on making the answers."""

    batches: int = 0
    items: int = 0
    seconds: float = 0.0

    def take(self) -> bytes:
        """As JSON, and back to zero."""
        encoded = json.dumps(asdict(self)).encode()
        self.batches = self.items = 0
        self.seconds = 0.0
        return encoded


async def _serve_stream(
    requests: AsyncIterator[Any], context: Any, timings: Timings, answer: Callable[[Any], Any]
) -> None:
    async for batch in requests:
        if not batch.items:
            continue
        started = time.perf_counter()
        answers = answer(batch)
        timings.seconds += time.perf_counter() - started
        timings.batches += 1
        timings.items += len(batch.items)
        await context.write(answers)


class FixedDraft(draft_pb2_grpc.DraftServiceServicer):
    """DraftService without a model."""

    def __init__(self, answers: FixedAnswers, info: worker_pb2.GetModelInfoResponse, timings: Timings) -> None:
        self._answers = answers
        self._info = info
        self._timings = timings

    async def Propose(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.ProposeBatch], context: Any
    ) -> None:
        await _serve_stream(request_iterator, context, self._timings, self._answer)

    async def GetModelInfo(  # noqa: N802
        self, _request: worker_pb2.GetModelInfoRequest, _context: Any
    ) -> worker_pb2.GetModelInfoResponse:
        return self._info

    def _answer(self, batch: draft_pb2.ProposeBatch) -> draft_pb2.ProposalBatch:
        answered = draft_pb2.ProposalBatch()
        for item in batch.items:
            wanted = item.num_speculative_tokens + item.look_ahead
            result = answered.items.add(request_id=item.request_id, cache_epoch=item.cache_epoch)
            result.proposal.CopyFrom(self._answers.proposal(wanted))
            # The last drafted token is not run.
            result.proposal.cached_length = _prefix_length(item.prefix) + wanted - 1
        return answered


class FixedTarget(target_pb2_grpc.TargetServiceServicer):
    """TargetService without a model."""

    def __init__(self, answers: FixedAnswers, info: worker_pb2.GetModelInfoResponse, timings: Timings) -> None:
        self._answers = answers
        self._info = info
        self._timings = timings

    async def Verify(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[target_pb2.VerifyBatch], context: Any
    ) -> None:
        await _serve_stream(request_iterator, context, self._timings, self._answer)

    async def GetModelInfo(  # noqa: N802
        self, _request: worker_pb2.GetModelInfoRequest, _context: Any
    ) -> worker_pb2.GetModelInfoResponse:
        return self._info

    def _answer(self, batch: target_pb2.VerifyBatch) -> target_pb2.VerdictBatch:
        answered = target_pb2.VerdictBatch()
        for item in batch.items:
            block = len(item.draft_token_ids) // TOKEN_BYTES
            result = answered.items.add(request_id=item.request_id, cache_epoch=item.cache_epoch)
            result.verdict.CopyFrom(self._answers.verdict(block, len(item.support_ids)))
            result.verdict.cached_length = _prefix_length(item.prefix) + block
        return answered


def _prefix_length(update: worker_pb2.PrefixUpdate) -> int:
    return update.base_length + len(update.token_ids) // TOKEN_BYTES


def plain_ids(tokenizer: Any, count: int) -> list[int]:
    """Ids of tokens that are ordinary text by themselves, `count` of them at most."""
    special = set(tokenizer.all_special_ids)
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(len(tokenizer)) if token_id not in special)
    plain = [token_id for token_id, text in texts if text.strip().isascii() and text.strip().isalnum()]
    return plain[:count]


def _model_info(tokenizer: Any) -> worker_pb2.GetModelInfoResponse:
    strings = token_strings(tokenizer)
    return worker_pb2.GetModelInfoResponse(
        model="fixed",
        vocabulary_size=len(strings),
        padded_vocabulary_size=len(strings),
        vocabulary_fingerprint=vocabulary_fingerprint(strings),
        context_length=CONTEXT_LENGTH,
        dtype="none",
        device="none",
        slots=1024,
        max_speculative_tokens=64,
        sampling_version=SAMPLING_VERSION,
    )


def _timings_handler(timings: Timings) -> grpc.GenericRpcHandler:
    async def read(_request: bytes, _context: Any) -> bytes:
        return timings.take()

    methods: Any = {
        "Timings": grpc.unary_unary_rpc_method_handler(read),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    return grpc.method_handlers_generic_handler(TIMINGS_SERVICE, methods)


async def serve(options: argparse.Namespace) -> int:
    """Serves until SIGTERM."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    info = _model_info(tokenizer)
    answers = FixedAnswers(plain_ids(tokenizer, 4 * options.support_size), options.support_size, options.acceptance)
    timings = Timings()
    server = grpc.aio.server(options=grpc_server.server_options())
    draft_pb2_grpc.add_DraftServiceServicer_to_server(FixedDraft(answers, info, timings), server)
    target_pb2_grpc.add_TargetServiceServicer_to_server(FixedTarget(answers, info, timings), server)
    server.add_generic_rpc_handlers((_timings_handler(timings),))
    health = grpc_server.HealthSwitch("tandem.v1.TargetService")
    await health.attach(server)
    # Two addresses, since two services have two connections.
    grpc_server.bind(server, options.draft, "--draft")
    grpc_server.bind(server, options.target, "--target")
    stop = grpc_server.stop_event()
    await server.start()
    await health.set(serving=True)
    await stop.wait()
    await server.stop(0)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the service and returns its exit status."""
    parser = argparse.ArgumentParser(description="A draft and a target without models.")
    parser.add_argument("--draft", required=True, help="host:port of DraftService")
    parser.add_argument("--target", required=True, help="host:port of TargetService")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer whose ids are used")
    parser.add_argument("--acceptance", type=float, required=True)
    parser.add_argument("--support-size", type=int, required=True)
    return grpc_server.run(serve(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
