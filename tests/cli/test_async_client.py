"""The client for asyncio: what the other one does, and its own ways to end."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from tandem.client import (
    AsyncTandemClient,
    CancelledCallError,
    Chunk,
    DeadlineError,
    FieldViolation,
    FinishedError,
    GenerationOptions,
    InvalidRequestError,
    ProtocolError,
    SamplingChange,
    SamplingInForce,
    TandemClient,
    TandemError,
    UnavailableError,
)
from tandem.v1 import orchestrator_pb2 as pb


async def collected(client: AsyncTandemClient, **arguments) -> list[Chunk]:
    return [chunk async for chunk in client.generate("hi", **arguments)]


async def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_its_chunks_and_requests_are_those_of_the_other(orchestrator):
    options = GenerationOptions(max_tokens=7, temperature=0.0, stop=("x",))
    with TandemClient(orchestrator.address) as client:
        expected = list(client.generate("hi", options, request_id="r"))
    async with AsyncTandemClient(orchestrator.address) as client:
        assert await collected(client, options=options, request_id="r") == expected
    first, second = orchestrator.requests
    assert first == second


async def test_many_at_once_on_one_connection(orchestrator):
    async with AsyncTandemClient(orchestrator.address) as client:
        results = await asyncio.gather(*(collected(client) for _ in range(8)))
    assert results == [results[0]] * 8


async def test_errors_are_typed(orchestrator, free_port):
    orchestrator.fail_invalid()
    async with AsyncTandemClient(orchestrator.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await collected(client)
        assert caught.value.violations == (FieldViolation("top_p", "must be in (0, 1]"),)
        orchestrator.fail(code_pb2.INTERNAL, "broken")
        with pytest.raises(TandemError) as caught:
            await collected(client)
        assert caught.value.code is grpc.StatusCode.INTERNAL
    async with AsyncTandemClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(UnavailableError):
            await collected(client)


async def test_a_stream_without_an_end_is_not_a_success(orchestrator):
    orchestrator.responses = orchestrator.responses[:-1]
    async with AsyncTandemClient(orchestrator.address) as client:
        with pytest.raises(ProtocolError):
            await collected(client)


async def test_a_deadline(orchestrator):
    orchestrator.pause_seconds = 60
    async with AsyncTandemClient(orchestrator.address) as client:
        with pytest.raises(DeadlineError):
            await collected(client, timeout=0.3)


async def test_cancelling_ends_the_call_and_not_the_task(orchestrator):
    orchestrator.pause_seconds = 60
    async with AsyncTandemClient(orchestrator.address) as client:
        generation = client.generate("hi")
        assert (await anext(generation)).text == "The sky is"
        generation.cancel()
        with pytest.raises(CancelledCallError):
            await anext(generation)
        await wait_for(lambda: orchestrator.cancelled == 1)


async def test_cancelling_the_task_ends_the_call(orchestrator):
    orchestrator.pause_seconds = 60
    async with AsyncTandemClient(orchestrator.address) as client:
        task = asyncio.create_task(collected(client))
        await wait_for(lambda: orchestrator.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_for(lambda: orchestrator.cancelled == 1)


async def test_leaving_the_generation_ends_the_call(orchestrator):
    orchestrator.pause_seconds = 60
    async with AsyncTandemClient(orchestrator.address) as client:
        async with client.generate("hi") as generation:
            async for _ in generation:
                break
        await wait_for(lambda: orchestrator.cancelled == 1)


async def test_a_change_is_sent_as_it_is_and_its_errors_are_typed(orchestrator):
    change = SamplingChange(
        temperature=0.0,
        num_speculative_tokens=0,
        adaptive_speculative_tokens=False,
        logit_bias={},
        banned_token_ids=[3],
        bad_words_token_ids=[[4, 5]],
    )
    with TandemClient(orchestrator.address) as blocking:
        async with AsyncTandemClient(orchestrator.address) as client:
            assert await client.update_sampling("r", change) == SamplingInForce(2, 17)
            assert blocking.update_sampling("r", change) == SamplingInForce(2, 17)
            expected = pb.UpdateSamplingRequest(
                request_id="r",
                temperature=0.0,
                num_speculative_tokens=0,
                adaptive_speculative_tokens=False,
                logit_bias={},
                banned_token_ids={"ids": [3]},
                bad_words={"token_ids": [{"ids": [4, 5]}]},
            )
            assert orchestrator.updates == [expected, expected]
            # Zero and nothing are sent, what is left out is not.
            assert blocking.update_sampling("r", SamplingChange()) == SamplingInForce(2, 17)
            assert orchestrator.updates[-1] == pb.UpdateSamplingRequest(request_id="r")
            finished = error_details_pb2.ErrorInfo(reason="REQUEST_FINISHED", domain="tandem")
            orchestrator.fail(code_pb2.FAILED_PRECONDITION, "the request is finished", finished)
            with pytest.raises(FinishedError):
                blocking.update_sampling("r", change)
            with pytest.raises(FinishedError):
                await client.update_sampling("r", change)
