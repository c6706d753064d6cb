"""Several completions of one prompt: each a request of its own, their responses in one stream."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from typing import TypeVar

import grpc

from tandem.randomness import completion_seed
from tandem.v1 import orchestrator_pb2 as api

from .call import Call, CallAround
from .errors import RequestFailed, let_go
from .request import GenerationPlan

T = TypeVar("T")

_CUT_OFF = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
"""After one of these the completions can be resumed, each by its name; other failures are the last word."""


def plan_of(plan: GenerationPlan, index: int) -> GenerationPlan:
    """The plan of one completion: the same but for its name and its seed."""
    if index == 0:
        return plan
    sampling = type(plan.sampling)()
    sampling.CopyFrom(plan.sampling)
    sampling.seed = completion_seed(plan.sampling.seed, index)
    return dataclasses.replace(plan, request_id=f"{plan.request_id}#{index}", sampling=sampling)


def request_of(request: api.GenerateRequest, plan: GenerationPlan, index: int) -> api.GenerateRequest:
    """What the caller would send for this completion alone; without a name if the request has none."""
    alone = api.GenerateRequest()
    alone.CopyFrom(request)
    alone.ClearField("n")
    if index > 0:
        alone.seed = plan.sampling.seed
        alone.request_id = plan.request_id if request.request_id else ""
    return alone


class SharedCall(CallAround):
    """One call for the responses of all completions, one at a time."""

    def __init__(self, call: Call, completions: int) -> None:
        super().__init__(call)
        self._unfinished = completions
        self._completion_tokens = 0
        self._writing = asyncio.Lock()
        self._refused = False

    def of(self, index: int) -> Call:
        """The call as completion `index` sees it."""
        return _CallOfOne(self, index)

    @property
    def may_return(self) -> bool:
        """As the one call has it, but where it was refused: what was begun for it is of no use to anybody."""
        return self._call.may_return and not self._refused

    async def write(self, response: api.GenerateResponse) -> None:
        """Sends a response; the last finish gets the usage of all."""
        async with self._writing:
            if response.HasField("finish"):
                usage = response.finish.usage
                self._unfinished -= 1
                self._completion_tokens += usage.completion_tokens
                if self._unfinished == 0:
                    response.finish.total_usage.prompt_tokens = usage.prompt_tokens
                    response.finish.total_usage.completion_tokens = self._completion_tokens
            await self._call.write(response)

    async def run(self, completions: Sequence[Coroutine[None, None, T]]) -> list[T]:
        """Runs all to their end. The first failure ends the others, and is raised."""
        try:
            return await self._together(completions)
        except asyncio.CancelledError as gone:
            let_go(gone)  # a group of tasks keeps what has ended it, and is kept by it
            raise

    async def _together(self, completions: Sequence[Coroutine[None, None, T]]) -> list[T]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._noticing_refusal(each)) for each in completions]
        except* RequestFailed as failures:
            raise _first(failures) from None
        return [task.result() for task in tasks]

    async def _noticing_refusal(self, completion: Coroutine[None, None, T]) -> T:
        try:
            return await completion
        except RequestFailed as failure:
            # The others look at it as they are ended.
            self._refused = self._refused or failure.code not in _CUT_OFF
            raise
        except asyncio.CancelledError as gone:
            let_go(gone)  # so does its task
            raise


class _CallOfOne(CallAround):
    def __init__(self, shared: SharedCall, index: int) -> None:
        super().__init__(shared)
        self._index = index

    async def write(self, response: api.GenerateResponse) -> None:
        response.index = self._index
        await super().write(response)


def _first(failures: BaseExceptionGroup[RequestFailed]) -> RequestFailed:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
