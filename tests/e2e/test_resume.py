"""A request goes on at another orchestrator, whatever became of the first: the joined text is that of an undisturbed run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import redis

from tandem.client import GenerationOptions, NotFoundError, TandemClient
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tandem.v1.sampling_pb2 import ACCEPTANCE_METHOD_COUPLED
from tandem.wire import encode_ids
from tests.support.channels import open_channel
from tests.support.generation import gather, paced_channel, request
from tests.support.services import MODELS, Stack, running_stack

PROMPT = [5, 6, 7]
LENGTH = {"max_tokens": 90, "ignore_eos": True}
GREEDY = {"temperature": 0.0, **LENGTH}
COUPLED = {"temperature": 0.9, "seed": 7, "acceptance_method": ACCEPTANCE_METHOD_COUPLED, **LENGTH}
RESUME_SECONDS = 30
"""Long enough that a busy machine finds the state within them; a test that waits for their end lets them pass."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"TANDEM_RESUME_SECONDS": str(RESUME_SECONDS), "TANDEM_STORE_RETRY_SECONDS": "60"}
    with running_stack(
        tmp_path_factory.mktemp("resume"),
        MODELS / "tiny-target",
        MODELS / "tiny-draft",
        environment,
        replicas={"orchestrator": 2},
        store_proxy=True,
    ) as running:
        yield running


@dataclass
class Caller:
    """What a caller gathered, over all its calls."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    text: str = ""
    finish: api.GenerationFinish | None = None
    pieces: list[str] = field(default_factory=list)

    def take(self, response: api.GenerateResponse) -> None:
        assert self.finish is None
        self.ids += [token.token_id for token in response.tokens]
        self.kinds += [token.kind for token in response.tokens]
        self.pieces += [token.text for token in response.tokens]
        self.text += response.text
        if response.HasField("finish"):
            self.finish = response.finish

    def read(self, call: Iterator[api.GenerateResponse], tokens: int | None = None) -> None:
        """Reads to the end, or until so many tokens are there."""
        while tokens is None or len(self.ids) < tokens:
            response = next(call, None)
            if response is None:
                return
            self.take(response)

    @property
    def seen(self) -> tuple[Any, ...]:
        assert self.finish is not None
        usage = (self.finish.usage.prompt_tokens, self.finish.usage.completion_tokens)
        return (self.ids, self.text, self.finish.reason, usage)


def _stub(channel: grpc.Channel) -> orchestrator_pb2_grpc.OrchestratorServiceStub:
    return orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


@pytest.fixture
def channels(stack: Stack) -> Iterator[list[grpc.Channel]]:
    # Of each test's own: gRPC shares connections within a process, and one may be to a process that was killed. Paced, so that no
    # request comes to its end before it is disturbed.
    opened = [paced_channel(each.address) for each in stack.orchestrators]
    yield opened
    for channel in opened:
        channel.close()


def _resumption(request_id: str, offset: int) -> api.GenerateRequest:
    return api.GenerateRequest(request_id=request_id, token_offset=offset)


def _resumed(channel: grpc.Channel, request_id: str, caller: Caller) -> Caller:
    call = _stub(channel).Generate(_resumption(request_id, len(caller.ids)), timeout=120)
    first = next(call)
    assert first.start.request_id == request_id
    caller.take(first)
    caller.read(call)
    return caller


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[float, tuple[Any, ...]]:
    """What plain decoding says, by temperature."""
    with open_channel(stack.orchestrators[1].address) as channel:
        calls = [request(PROMPT, num_speculative_tokens=0, **fields) for fields in (GREEDY, COUPLED)]
        return {each.temperature: gather(_stub(channel).Generate(each, timeout=120)).seen for each in calls}


def _taken_over(stack: Stack, channel: grpc.Channel, request_id: str, offset: int) -> Any:
    """A call that has become the owner. The target waits meanwhile, or the owner before might come to its end."""
    store = redis.Redis.from_url(stack.redis_url)
    fence = store.hget(f"tandem:{{{request_id}}}:state", "fence")
    for each in stack.orchestrators:
        each.wait_serving()  # it may have missed the target the last time
    stack.target.signal(signal.SIGSTOP)
    try:
        call = _stub(channel).Generate(_resumption(request_id, offset), timeout=120)
        _wait(lambda: store.hget(f"tandem:{{{request_id}}}:state", "fence") != fence)
    finally:
        stack.target.signal(signal.SIGCONT)
    return call


def _rest(call: Any) -> grpc.RpcError:
    """How a stream that must fail does."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    return caught.value


@pytest.mark.parametrize("gamma", [0, 2, 5])
@pytest.mark.parametrize("fields", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_another_orchestrator_goes_on_and_the_owner_is_fenced_off(
    stack: Stack,
    channels: list[grpc.Channel],
    undisturbed: dict[float, tuple[Any, ...]],
    gamma: int,
    fields: dict[str, Any],
) -> None:
    fields = {**fields, "num_speculative_tokens": gamma}
    request_id = f"moved-{gamma}-{fields['temperature']}"
    caller = Caller()
    first = _stub(channels[0]).Generate(request(PROMPT, request_id=request_id, **fields), timeout=120)
    caller.read(first, 10)
    had = len(caller.ids)
    caller.read(_taken_over(stack, channels[1], request_id, had))
    error = _rest(first)
    assert error.code() == grpc.StatusCode.ABORTED  # type: ignore[attr-defined]
    assert caller.seen == undisturbed[request(PROMPT, **fields).temperature]
    assert api.TOKEN_KIND_REPLAYED not in caller.kinds[:had]


Fault = Callable[[Stack], Callable[[], None]]


def _killed(stack: Stack) -> Callable[[], None]:
    stack.orchestrator.kill()

    def restart() -> None:
        stack.orchestrator.start()
        stack.orchestrator.wait_serving()

    return restart


def _paused(stack: Stack) -> Callable[[], None]:
    stack.orchestrator.signal(signal.SIGSTOP)
    return lambda: stack.orchestrator.signal(signal.SIGCONT)


def _cut_off(stack: Stack) -> Callable[[], None]:
    assert stack.store_proxy is not None
    proxy = stack.store_proxy
    proxy.do(lambda each: each.cut())
    return lambda: proxy.do(lambda each: each.cut(silent=False))


ENDINGS = {_killed: grpc.StatusCode.UNAVAILABLE, _paused: grpc.StatusCode.ABORTED, _cut_off: grpc.StatusCode.ABORTED}


@pytest.mark.parametrize(("fault", "gamma"), [(_killed, 2), (_paused, 0), (_paused, 5), (_cut_off, 0), (_cut_off, 5)])
def test_the_owner_is_gone(
    stack: Stack, channels: list[grpc.Channel], undisturbed: dict[float, tuple[Any, ...]], fault: Fault, gamma: int
) -> None:
    fields = {**(COUPLED if gamma == 5 else GREEDY), "num_speculative_tokens": gamma}
    request_id = f"gone-{fault.__name__}-{gamma}"
    caller = Caller()
    first = _stub(channels[0]).Generate(request(PROMPT, request_id=request_id, **fields), timeout=120)
    caller.read(first, 10)
    heal = fault(stack)
    try:
        _resumed(channels[1], request_id, caller)
    finally:
        heal()
    assert caller.seen == undisturbed[request(PROMPT, **fields).temperature]
    # What the old owner had committed before, its caller may still read; nothing new, and the end is a status.
    late = Caller()
    with pytest.raises(grpc.RpcError) as caught:
        late.read(first)
    assert caught.value.code() == ENDINGS[fault]  # type: ignore[index, attr-defined]
    assert late.finish is None
    stack.orchestrator.wait_serving()


def test_the_first_owner_takes_it_back(
    stack: Stack, channels: list[grpc.Channel], undisturbed: dict[float, tuple[Any, ...]]
) -> None:
    fields = {**GREEDY, "num_speculative_tokens": 2}
    caller, calls = Caller(), []
    calls.append(_stub(channels[0]).Generate(request(PROMPT, request_id="to-and-fro", **fields), timeout=120))
    caller.read(calls[0], 10)
    for turn in range(1, 5):
        calls.append(_taken_over(stack, channels[turn % 2], "to-and-fro", len(caller.ids)))
        caller.read(calls[-1], 10 + 10 * turn)
    # On the very orchestrator that runs it now.
    caller.read(_taken_over(stack, channels[0], "to-and-fro", len(caller.ids)))
    assert caller.seen == undisturbed[0.0]
    assert {_rest(call).code() for call in calls} == {grpc.StatusCode.ABORTED}  # type: ignore[attr-defined]


@pytest.mark.parametrize("gamma", [0, 5])
def test_a_sampling_changed_elsewhere_is_that_of_the_owner_and_of_who_resumes(
    stack: Stack, channels: list[grpc.Channel], undisturbed: dict[float, tuple[Any, ...]], gamma: int
) -> None:
    """Changed at the orchestrator that doesn't run it, taken over there, and changed once more while nobody runs it."""
    name, caller = f"changed-{gamma}", Caller()
    first = _stub(channels[0]).Generate(
        request(PROMPT, request_id=name, num_speculative_tokens=gamma, **COUPLED), timeout=120
    )
    caller.read(first, 5)
    at = _changed(channels[1], name, repetition_penalty=1.5)
    caller.read(first, at + 10)
    moved = _taken_over(stack, channels[1], name, len(caller.ids))
    caller.read(moved, len(caller.ids) + 10)
    assert _rest(first).code() == grpc.StatusCode.ABORTED  # type: ignore[attr-defined]
    moved.cancel()
    _wait(lambda: 0 < _state_seconds(stack, name) <= RESUME_SECONDS)
    last = _changed(channels[0], name, temperature=0.3)
    _resumed(channels[0], name, caller)
    assert caller.ids[:at] == undisturbed[request(PROMPT, **COUPLED).temperature][0][:at]
    assert at < last <= len(caller.ids)
    for start, end, fields in ((at, last, {}), (last, LENGTH["max_tokens"], {"temperature": 0.3})):
        fresh = {**COUPLED, "repetition_penalty": 1.5, "max_tokens": end - start, "num_speculative_tokens": 0, **fields}
        expected = gather(_stub(channels[0]).Generate(request([*PROMPT, *caller.ids[:start]], **fresh), timeout=120))
        assert caller.ids[start:end] == expected.ids


def _changed(channel: grpc.Channel, request_id: str, **fields: Any) -> int:
    """From which token on."""
    sent = api.UpdateSamplingRequest(request_id=request_id, **fields)
    answer = _stub(channel).UpdateSampling(sent, timeout=120)
    assert _stub(channel).UpdateSampling(sent, timeout=120) == answer
    return answer.completion_tokens


def test_a_finished_request_is_read_again_from_any_offset(channels: list[grpc.Channel]) -> None:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    caller = Caller()
    caller.read(_stub(channels[0]).Generate(request("Once", request_id="read-again", **fields), timeout=120))
    # A stop string out of the text itself, so that some is held back and some cut.
    stop = caller.text[len(caller.text) // 2 :][:6]
    once = Caller()
    stopped = request("Once", request_id="read-again-stop", stop=[stop], **fields)
    once.read(_stub(channels[0]).Generate(stopped, timeout=120))
    assert once.finish is not None
    assert once.finish.reason == api.FINISH_REASON_STOP
    for request_id, whole in (("read-again", caller), ("read-again-stop", once)):
        for offset in range(0, len(whole.ids) + 1, 3):
            again = Caller()
            again.read(_stub(channels[offset % 2]).Generate(_resumption(request_id, offset), timeout=120))
            assert again.ids == whole.ids[offset:]
            assert again.text == "".join(whole.pieces[offset:])
            assert again.finish == whole.finish
            assert set(again.kinds) <= {api.TOKEN_KIND_REPLAYED}


def test_nothing_after_the_end_is_stored(
    stack: Stack, channels: list[grpc.Channel], undisturbed: dict[float, tuple[Any, ...]]
) -> None:
    """Wherever in a block the end lies, the tokens behind it are nobody's."""
    ids, text, *_ = undisturbed[0.0]
    ends: list[dict[str, Any]] = [{"stop_token_ids": [token_id]} for token_id in ids[1:4]]
    ends += [{"stop": [text[len(text) // 2 :][:4]]}, {"max_tokens": 4}]
    with redis.Redis.from_url(stack.redis_url) as store:
        for number, end in enumerate(ends):
            name, caller = f"ends-{number}", Caller()
            sent = request(PROMPT, request_id=name, num_speculative_tokens=5, **{**GREEDY, **end})
            caller.read(_stub(channels[0]).Generate(sent, timeout=120))
            assert caller.finish is not None
            assert caller.ids == ids[: len(caller.ids)] != ids
            assert store.get(f"tandem:{{{name}}}:tokens") == encode_ids([*PROMPT, *caller.ids])


def test_an_owner_lost_between_the_last_commit_and_the_end(stack: Stack, channels: list[grpc.Channel]) -> None:
    caller = Caller()
    caller.read(_stub(channels[0]).Generate(request(PROMPT, request_id="nearly", **GREEDY), timeout=120))
    store = redis.Redis.from_url(stack.redis_url)
    store.hset("tandem:{nearly}:state", "status", "running")
    store.hdel("tandem:{nearly}:state", "finish")
    again = Caller()
    again.read(_stub(channels[1]).Generate(_resumption("nearly", 0), timeout=120))
    assert again.seen == caller.seen
    assert store.hget("tandem:{nearly}:state", "status") == b"finished"


def test_what_cannot_be_resumed_is_refused_and_disturbs_nobody(channels: list[grpc.Channel]) -> None:
    caller = Caller()
    content = request(PROMPT, request_id="mine", num_speculative_tokens=2, **GREEDY)
    running = _stub(channels[0]).Generate(content, timeout=120)
    caller.read(running, 5)
    other, same = api.GenerateRequest(), api.GenerateRequest()
    other.CopyFrom(content)
    other.seed = 1
    same.CopyFrom(content)
    refusals: list[tuple[api.GenerateRequest, grpc.StatusCode, str]] = [
        (other, grpc.StatusCode.ALREADY_EXISTS, "another request"),
        (same, grpc.StatusCode.ALREADY_EXISTS, "token_offset"),
        (_resumption("nobody", 0), grpc.StatusCode.NOT_FOUND, "no request"),
        (_resumption("", 0), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (_resumption("mine", 100_000), grpc.StatusCode.INVALID_ARGUMENT, "token_offset"),
    ]
    with_offset = api.GenerateRequest()
    with_offset.CopyFrom(other)
    with_offset.token_offset = 0
    refusals.append((with_offset, grpc.StatusCode.ALREADY_EXISTS, "another request"))
    for each, code, words in refusals:
        error = _rest(_stub(channels[1]).Generate(each, timeout=120))
        assert error.code() == code  # type: ignore[attr-defined]
        assert words in error.details()  # type: ignore[attr-defined]
    caller.read(running)
    assert caller.finish is not None
    # The whole request again, with an offset, is a resumption as well.
    same.token_offset = 0
    again = Caller()
    again.read(_stub(channels[1]).Generate(same, timeout=120))
    assert again.seen == caller.seen


def _state_seconds(stack: Stack, request_id: str) -> float:
    """Until the state expires; 0 if it has gone."""
    store = redis.Redis.from_url(stack.redis_url)
    return max(0, store.pttl(f"tandem:{{{request_id}}}:state")) / 1000  # type: ignore[operator]


def _wait(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("orchestrator", [0, 1])
def test_a_caller_that_lost_its_connection_comes_back(
    stack: Stack, channels: list[grpc.Channel], undisturbed: dict[float, tuple[Any, ...]], orchestrator: int
) -> None:
    caller, name = Caller(), f"back-{orchestrator}"
    call = _stub(channels[0]).Generate(request(PROMPT, request_id=name, **GREEDY), timeout=120)
    caller.read(call, 10)
    call.cancel()
    _wait(lambda: _state_seconds(stack, name) <= RESUME_SECONDS)
    _resumed(channels[orchestrator], name, caller)
    assert caller.seen == undisturbed[0.0]


def test_the_state_of_a_caller_that_stays_away_goes(stack: Stack, channels: list[grpc.Channel]) -> None:
    named = _stub(channels[0]).Generate(request(PROMPT, request_id="stays-away", **GREEDY), timeout=120)
    unnamed = _stub(channels[0]).Generate(request(PROMPT, **GREEDY), timeout=120)
    unnamed_id = next(unnamed).start.request_id
    next(named)
    for call in (named, unnamed):
        call.cancel()
    _wait(lambda: 0 < _state_seconds(stack, "stays-away") <= RESUME_SECONDS)
    _wait(lambda: _state_seconds(stack, unnamed_id) == 0)
    with redis.Redis.from_url(stack.redis_url) as store:
        for part in ("state", "tokens"):
            assert store.pexpire(f"tandem:{{stays-away}}:{part}", 1), f"no {part} that would have lasted until then"
    _wait(lambda: _state_seconds(stack, "stays-away") == 0)
    with TandemClient(stack.orchestrators[1].address) as client, pytest.raises(NotFoundError):
        next(client.resume("stays-away", 0))


def test_the_client_resumes(stack: Stack) -> None:
    first, second = (TandemClient(each.address) for each in stack.orchestrators)
    with first, second:
        chunks = list(first.generate(PROMPT, GenerationOptions(max_tokens=12), request_id="by-client"))
        rest = list(second.resume("by-client", 3))
    ids = [token.token_id for chunk in chunks for token in chunk.tokens]
    assert [token.token_id for chunk in rest for token in chunk.tokens] == ids[3:]
    assert rest[-1].finish == chunks[-1].finish


def test_health_tells_of_a_store_that_does_not_answer(stack: Stack) -> None:
    stack.orchestrator.wait_serving()
    heal = _cut_off(stack)
    began = time.monotonic()
    try:
        _wait(lambda: not stack.orchestrator.serving())
        # Two seconds, and some for a busy machine; a commit would be retried for sixty.
        assert time.monotonic() - began < 40
        assert stack.orchestrators[1].serving(seconds=60)
    finally:
        heal()
    stack.orchestrator.wait_serving()
