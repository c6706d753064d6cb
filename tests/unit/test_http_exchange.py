"""What an HTTP caller gets when things go wrong, before and after the answer has begun; the inner path is played."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from orchestrator.callers import Callers
from orchestrator.errors import Aborted, Overloaded, RequestFailed, Unavailable
from orchestrator.http import generation_endpoint
from orchestrator.http.app import build_app
from orchestrator.http.body import BodyRoom
from tandem.v1 import orchestrator_pb2 as api

Play = Callable[[Any], Awaitable[None]]

START = api.GenerateResponse(
    start=api.GenerationStart(request_id="r", seed=1, prompt_tokens=2, model="m"), text="The", tokens=[]
)
FINISH = api.GenerateResponse(
    text=" end", finish=api.GenerationFinish(reason=1, usage=api.Usage(prompt_tokens=2, completion_tokens=3))
)


class Recorded:
    """Requests that never became any."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def begin(self, *_: Any) -> Any:
        return SimpleNamespace(end=lambda status, *_: self.ended.append(status))


def application(play: Play, recorded: Recorded | None = None) -> Any:
    async def generate(_: api.GenerateRequest, call: Any) -> None:
        await play(call)

    model = SimpleNamespace(name=lambda: "m", check=lambda _: None, token_text=str)
    generations: Any = SimpleNamespace(run=generate)
    recorders: Any = recorded or Recorded()
    return build_app(generations, recorders, Callers(""), model, CollectorRegistry(), lambda: False)  # type: ignore[arg-type]


async def post(play: Play, recorded: Recorded | None = None, **fields: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=application(play, recorded), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/completions", json={"prompt": "p", **fields})


def fails(failure: Exception, *before: api.GenerateResponse) -> Play:
    async def play(call: Any) -> None:
        for response in before:
            await call.write(response)
        raise failure

    return play


FAILURES = [
    (Unavailable("away", "TARGET_UNAVAILABLE", 2.0), 503, "server_error", "2"),
    (Overloaded("full", "QUEUE_FULL", 1.0), 429, "rate_limit_error", "1"),
    (Aborted("taken over", "TAKEN_OVER"), 409, "invalid_request_error", None),
    (RequestFailed("broken", "INTERNAL"), 500, "server_error", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "kind", "retry"), FAILURES)
async def test_a_failure_before_the_answer_is_its_status(
    failure: RequestFailed, status: int, kind: str, retry: str | None, stream: bool
) -> None:
    answer = await post(fails(failure), stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"] == {
        "message": str(failure),
        "type": kind,
        "param": None,
        "code": failure.reason.lower(),
    }
    assert answer.headers.get("retry-after") == retry
    assert answer.headers["x-request-id"]


async def test_a_failure_in_the_midst_of_a_stream_is_its_last_event() -> None:
    answer = await post(fails(FAILURES[0][0], START), stream=True)
    assert answer.status_code == 200
    *chunks, last = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "The"
    assert json.loads(last)["error"]["code"] == "target_unavailable"


async def test_a_failure_in_the_midst_of_an_answer_in_one_piece_is_its_status() -> None:
    assert (await post(fails(FAILURES[0][0], START))).status_code == 503


async def test_a_fault_of_our_own_tells_nothing_of_itself() -> None:
    answer = await post(fails(ZeroDivisionError("secret")))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


async def plays_well(call: Any) -> None:
    await call.write(START)
    await call.write(FINISH)


async def test_a_good_answer_ends_as_it_should() -> None:
    answer = await post(plays_well)
    assert answer.json()["choices"][0]["text"] == "The end"
    streamed = await post(plays_well, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_what_is_refused_unread_is_recorded_as_a_request() -> None:
    recorded = Recorded()
    assert (await post(fails(AssertionError("not to be reached")), recorded, unheard_of=1)).status_code == 400
    assert recorded.ended == ["INVALID_ARGUMENT"]


SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [(b"content-type", b"application/json")],
    "query_string": b"",
}


async def exchange(play: Play, messages: list[dict[str, Any]], wait: asyncio.Event | None = None) -> list[Any]:
    """One exchange by hand; after its messages the caller leaves, once `wait` is set."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        if wait is not None:
            await wait.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await application(play)(dict(SCOPE), receive, send)
    return sent


BODY = {"type": "http.request", "body": b'{"prompt": "p"}', "more_body": False}


async def test_bodies_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.http.app.BodyRoom", partial(BodyRoom, 30_000))
    recorded = Recorded()
    served = application(plays_well, recorded)
    # Small ones need no room.
    beginning = {
        "type": "http.request",
        "body": b'{"prompt": "' + bytes(20_000).replace(b"\0", b"p"),
        "more_body": True,
    }
    end = {"type": "http.request", "body": b'p"}', "more_body": False}

    async def status(inbox: asyncio.Queue[dict[str, Any]]) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await served(dict(SCOPE), inbox.get, send)
        return int(sent[0]["status"])

    first, second, third = (asyncio.Queue[dict[str, Any]]() for _ in range(3))
    for inbox in (first, second):
        inbox.put_nowait(beginning)
    slow = asyncio.create_task(status(first))
    while not first.empty():  # noqa: ASYNC110 - then its bytes are held, which is announced to nobody
        await asyncio.sleep(0)
    assert await status(second) == 429
    assert recorded.ended == ["RESOURCE_EXHAUSTED"]
    small = asyncio.Queue[dict[str, Any]]()
    small.put_nowait(BODY)
    assert await status(small) == 200
    first.put_nowait(end)
    assert await slow == 200
    for part in (beginning, end):
        third.put_nowait(part)
    assert await status(third) == 200


async def test_a_caller_that_leaves_cancels_its_request_and_is_sent_nothing() -> None:
    running, gone, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def play(_: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(exchange(play, [BODY], gone))
    await running.wait()
    gone.set()
    assert await task == []
    assert cancelled.is_set()


@pytest.mark.parametrize("ticks", range(6))
async def test_a_caller_that_leaves_as_its_answer_comes_breaks_nothing(ticks: int) -> None:
    """At every step of the event loop around the end."""
    gone = asyncio.Event()

    async def play(call: Any) -> None:
        await call.write(START)
        await call.write(FINISH)
        asyncio.get_running_loop().call_soon(gone.set)
        for _ in range(ticks):
            await asyncio.sleep(0)

    sent = await exchange(play, [BODY], gone)
    assert sent == [] or sent[0]["status"] == 200
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_the_end_of_the_service_is_told_to_whom_it_cuts_off() -> None:
    running = asyncio.Event()

    async def play(_: Any) -> None:
        running.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(exchange(play, [BODY], asyncio.Event()))
    await running.wait()
    task.cancel()
    sent = await task
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "shutting_down"


async def test_a_caller_that_reads_nothing_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_endpoint, "LAST_WORD_SECONDS", 0.05)
    sent: list[Any] = []

    async def play(call: Any) -> None:
        await call.write(START)
        raise Overloaded("the stream was left unread for too long", "READER_TOO_SLOW")

    async def send(message: Any) -> None:
        if len(sent) == 2:  # the head and the first event
            await asyncio.Event().wait()
        sent.append(message)

    messages = [{**BODY, "body": b'{"prompt": "p", "stream": true}'}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    async with asyncio.timeout(60):
        await application(play)(dict(SCOPE), receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_a_body_that_breaks_off_is_no_request() -> None:
    sent = await exchange(fails(AssertionError("not to be reached")), [{**BODY, "more_body": True}])
    assert sent[0]["status"] == 400
