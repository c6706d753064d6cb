"""The HTTP face, by OpenAI's own client: the answers are those of the gRPC API, errors have their form, callers that leave
leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx2
import openai
import pytest
import redis

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.browser import BROWSER, browsing
from tests.support.channels import open_channel
from tests.support.generation import Generation, generate
from tests.support.ports import free_port
from tests.support.services import MODELS, REPOSITORY, Stack, running_stack

MODEL = "demo"
PROMPT = "def read_lines(path):\n"
MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "Read a file, über 1 GB."}]
GAMMAS = (0, 2, 5)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
COUPLED: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 32}
CONTEXT = 512
T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """A stack, and where its HTTP face is."""

    stack: Stack
    base: str
    channel: grpc.Channel
    http: httpx2.Client

    def post(self, path: str, **fields: Any) -> httpx2.Response:
        return self.http.post(path, json=fields)

    def running(self) -> float:
        """Requests that are being decoded, as /metrics has it."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith("tandem_num_requests_running "):
                return float(line.split()[1])
        raise AssertionError("no such metric")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The target waits, so that no request comes to its end."""
        self.stack.target.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.stack.target.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def held_amid(self, begin: Callable[[], T], running: int = 1) -> Iterator[T]:
        """The target waits amid so many requests that `begin` begins. Those that were over before it did, since this process was
        held up, are begun again."""
        for _ in range(10):
            begun = begin()
            with self.held():
                if self.running() == running:
                    yield begun
                    return
            wait_for("nothing runs", lambda: self.running() == 0)
        raise AssertionError("they were over each time")

    def cancelled(self) -> int:
        """Requests that the log says were cancelled."""
        return self.stack.orchestrator.log.read_text().count("status=CANCELLED")

    def sessions(self) -> int:
        """Requests that the store knows."""
        with redis.Redis.from_url(self.stack.redis_url) as store:
            return len(store.keys("*"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    listen = f"127.0.0.1:{free_port()}"
    environment = {
        "TANDEM_HTTP_LISTEN": listen,
        "TANDEM_SERVED_MODEL_NAME": MODEL,
        "TANDEM_MAX_TOKENS": "400",
        "TANDEM_MAX_RUNNING_REQUESTS": "4",
        "TANDEM_MAX_WAITING_REQUESTS": "0",
        "TANDEM_DRAIN_SECONDS": "240",
        "TANDEM_TARGET_CONTEXT_LENGTH": str(CONTEXT),
    }
    folder: Path = tmp_path_factory.mktemp("http")
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment) as stack,
        open_channel(stack.orchestrator.address) as channel,
        httpx2.Client(base_url=f"http://{listen}", timeout=60, trust_env=False) as http,
    ):
        yield Service(stack, f"http://{listen}/v1", channel, http)


@pytest.fixture(autouse=True)
def _ready(service: Service) -> None:
    """A target that was stopped for a while may have been missed, and who asks while it is gets no answer."""
    service.stack.orchestrator.wait_serving()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with httpx2.Client(trust_env=False) as http:
        yield openai.OpenAI(api_key="none", base_url=service.base, max_retries=0, timeout=60, http_client=http)


@pytest.fixture
async def async_client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with httpx2.AsyncClient(trust_env=False) as http:
        yield openai.AsyncOpenAI(api_key="none", base_url=service.base, max_retries=0, timeout=60, http_client=http)


def by_grpc(service: Service, gamma: int, *, coupled: bool, **fields: Any) -> Generation:
    return generate(
        service.channel, PROMPT, num_speculative_tokens=gamma, acceptance_method=2 if coupled else 1, **fields
    )


def generate_responses(service: Service, **fields: Any) -> list[api.GenerateResponse]:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(service.channel)
    return list(stub.Generate(api.GenerateRequest(text=PROMPT, **fields), timeout=60))


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize(("fields", "method"), [(GREEDY, "rejection"), (COUPLED, "coupled")])
def test_a_completion_is_that_of_grpc(
    service: Service, client: openai.OpenAI, gamma: int, fields: dict[str, Any], method: str
) -> None:
    expected = by_grpc(service, gamma, coupled=method == "coupled", **fields)
    extra = {"num_speculative_tokens": gamma, "acceptance_method": method, "return_tokens": True}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, extra_body=extra, **fields)
    (choice,) = answer.choices
    assert choice.text == expected.text
    assert choice.text.strip()
    assert choice.finish_reason == {1: "stop", 2: "length"}[expected.reason]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == expected.usage
    assert answer.usage.total_tokens == sum(expected.usage)
    assert [token["id"] for token in choice.tokens] == expected.ids
    kinds = {1: "accepted", 2: "recovered", 3: "bonus"}
    assert [token["kind"] for token in choice.tokens] == [kinds[kind] for kind in expected.kinds]
    assert choice.tandem["seed"] == fields.get("seed", choice.tandem["seed"])

    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, extra_body=extra, stream=True, stream_options={"include_usage": True}, **fields
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert [token["id"] for chunk in chunks for token in getattr(chunk.choices[0], "tokens", [])] == expected.ids
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert len(chunks) > 3
    drafted = [getattr(chunk.choices[0], "draft_tokens", 0) for chunk in chunks]
    assert sum(drafted) == chunks[-1].choices[0].tandem["draft_tokens"] == expected.speculation.draft_tokens
    assert max(drafted) == gamma
    assert (last.choices, last.usage) == ([], answer.usage)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_output_has_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, response_format=wanted)  # type: ignore[arg-type]
    assert json.loads(answer.choices[0].message.content or "")["answer"] in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"
    extra = {"structured_outputs": {"choice": ["left", "right"]}}
    choice = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, extra_body=extra).choices[0]
    assert choice.text in ("left", "right")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"structured_outputs": {"regex": "["}})
    assert caught.value.param == "structured_outputs"


def test_token_ids_are_a_prompt_too(service: Service, client: openai.OpenAI) -> None:
    ids = [5, 6, 7, 8]
    answer = client.completions.create(model=MODEL, prompt=ids, **GREEDY)
    assert answer.choices[0].text == generate(service.channel, ids, **GREEDY).text


async def test_a_chat_in_both_forms_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def whole(gamma: int) -> tuple[str | None, str | None]:
        extra = {"num_speculative_tokens": gamma}
        answer = await async_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=24, extra_body=extra
        )
        assert answer.choices[0].message.role == "assistant"
        assert answer.object == "chat.completion"
        return answer.choices[0].message.content, answer.choices[0].finish_reason

    async def streamed(gamma: int) -> tuple[str | None, str | None]:
        stream = await async_client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            extra_body={"num_speculative_tokens": gamma},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert all(chunk.usage is None for chunk in chunks)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return text, chunks[-1].choices[0].finish_reason

    results = await asyncio.gather(whole(0), whole(5), streamed(0), streamed(5))
    assert results[0][0]
    assert set(results) == {results[0]}


def test_a_stop_string_is_left_out_of_both_forms(client: openai.OpenAI, service: Service) -> None:
    text = by_grpc(service, 5, coupled=False, **GREEDY).text
    stop = text[9:12]
    for gamma in GAMMAS:
        extra = {"num_speculative_tokens": gamma, "return_tokens": True}
        fields = {**GREEDY, "stop": stop, "logprobs": 2, "extra_body": extra}
        answer = client.completions.create(model=MODEL, prompt=PROMPT, **fields)
        chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **fields))
        pieces = [chunk.choices[0].text for chunk in chunks]
        (choice,) = answer.choices
        assert choice.text == "".join(pieces) == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
        # One for each token up to the one that completes the stop, in both forms.
        told = [value for chunk in chunks if (own := chunk.choices[0].logprobs) for value in own.token_logprobs]
        assert told == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        assert len(told) == len(choice.tokens) == answer.usage.completion_tokens


@pytest.mark.parametrize("gamma", GAMMAS)
def test_log_probabilities_are_those_of_grpc(service: Service, client: openai.OpenAI, gamma: int) -> None:
    fields = {**GREEDY, "max_tokens": 12}
    calls = generate_responses(service, num_speculative_tokens=gamma, logprobs=True, top_logprobs=2, **fields)
    expected = [token for response in calls for token in response.tokens]
    extra = {"num_speculative_tokens": gamma, "return_tokens": True}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, extra_body=extra, **fields)
    (choice,) = answer.choices
    assert choice.logprobs.token_logprobs == pytest.approx([token.logprob for token in expected], abs=1e-5)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == len(choice.logprobs.text_offset) == 12
    for offset, token in zip(choice.logprobs.text_offset, choice.tokens, strict=True):
        assert choice.text[offset:].startswith(token["text"])
    for likeliest, token, own in zip(choice.logprobs.top_logprobs, expected, choice.logprobs.tokens, strict=True):
        assert max(likeliest.values()) == pytest.approx(token.top_logprobs[0].logprob, abs=1e-5)
        assert own in likeliest

    chat = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "logprobs": True}
    whole = client.chat.completions.create(top_logprobs=3, extra_body=extra, **chat).choices[0]
    assert whole.logprobs.content
    assert [len(entry.top_logprobs) for entry in whole.logprobs.content] == [3] * len(whole.logprobs.content)
    # Greedy: each is the likeliest, and its bytes make up the text.
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in whole.logprobs.content)
    text = b"".join(bytes(entry.bytes or ()) for entry in whole.logprobs.content)
    assert whole.message.content.encode() in text
    pieces = client.chat.completions.create(top_logprobs=3, stream=True, extra_body=extra, **chat)
    told = [entry for piece in pieces if piece.choices[0].logprobs for entry in piece.choices[0].logprobs.content]
    assert [entry.token for entry in told] == [entry.token for entry in whole.logprobs.content]


def test_several_choices_are_each_what_they_are_alone(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.2, "seed": 3}
    coupled = {"acceptance_method": "coupled"}
    answer = client.completions.create(n=3, extra_body=coupled, **fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3
    for choice in answer.choices:
        alone = client.completions.create(extra_body=coupled, **{**fields, "seed": choice.tandem["seed"]})
        assert alone.choices[0].text == choice.text
    assert answer.usage.completion_tokens == sum(choice.tandem["completion_tokens"] for choice in answer.choices)

    stream = client.completions.create(
        n=3, stream=True, stream_options={"include_usage": True}, extra_body=coupled, **fields
    )
    pieces, ends = {0: "", 1: "", 2: ""}, []
    *chunks, last = stream
    for chunk in chunks:
        (choice,) = chunk.choices
        pieces[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert list(pieces.values()) == texts
    assert sorted(ends) == [0, 1, 2]
    assert last.usage == answer.usage
    assert {chunk.id for chunk in chunks} == {last.id}


def test_the_prompt_is_echoed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, **GREEDY}
    plain = client.completions.create(**fields).choices[0].text
    assert client.completions.create(echo=True, **fields).choices[0].text == PROMPT + plain
    stream = client.completions.create(echo=True, stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT + plain


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", CONTEXT)
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 401}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [1] * CONTEXT}, "prompt"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": PROMPT, "stream": stream, **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message
    assert caught.value.request_id
    assert len(caught.value.response.content) < 1000


def test_a_chats_bad_fields_have_a_chats_names(client: openai.OpenAI) -> None:
    for fields, param in [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * CONTEXT}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b'{"prompt": NaN}', {}, 400, "invalid_json"),
        (b"[" * 100_000, {}, 400, "invalid_json"),
        (b"\xff", {}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        (b" " * (8 << 20) + b"{}", {}, 413, "body_too_large"),
    ],
)
def test_a_body_that_is_none(service: Service, content: bytes, headers: dict[str, str], status: int, code: str) -> None:
    answer = service.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json", **headers}
    )
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


def test_a_long_body_is_read_off_the_loop_and_refused_by_its_name(service: Service) -> None:
    answer = service.post("/v1/completions", prompt="x" * 1_000_001)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_missed_paths_and_methods_have_the_form_too(service: Service) -> None:
    for answer, status in [(service.http.get("/v1/nothing"), 404), (service.http.get("/v1/completions"), 405)]:
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_health_and_metrics(service: Service) -> None:
    assert (service.http.get("/healthz").status_code, service.http.get("/healthz").json()) == (200, {"status": "ready"})
    wait_for("nothing runs", lambda: service.running() == 0)
    before = service.http.get("/metrics").text
    service.post("/v1/completions", prompt=PROMPT, unheard_of=1)
    name = 'tandem_requests_total{outcome="INVALID_ARGUMENT"}'

    def count(text: str) -> float:
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)), 0.0)

    wait_for("it is counted", lambda: count(service.http.get("/metrics").text) == count(before) + 1)


def test_the_request_id_is_in_header_answer_and_log(service: Service) -> None:
    answer = service.http.post(
        "/v1/completions", json={"prompt": PROMPT, **GREEDY}, headers={"x-request-id": "mine-17"}
    )
    request_id = answer.headers["x-request-id"]
    assert request_id.startswith("mine-17-")
    assert answer.json()["id"] == f"cmpl-{request_id}"
    wait_for("the log has it", lambda: request_id in service.stack.orchestrator.log.read_text())
    again = service.http.post("/v1/completions", json={"prompt": PROMPT}, headers={"x-request-id": "mine-17"})
    assert again.status_code == 200
    odd = service.http.post("/v1/completions", json={"prompt": PROMPT}, headers={"x-request-id": "a b"})
    assert len(odd.headers["x-request-id"]) == 32


def wait_for(what: str, condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s: {what}"
        time.sleep(0.05)


LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "num_speculative_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_frees_its_place_and_its_state(service: Service, stream: bool) -> None:
    wait_for("nothing runs", lambda: service.running() == 0)
    sessions, cancelled = service.sessions(), service.cancelled()
    body = json.dumps({**LONG, "stream": stream}).encode()
    host, _, port = service.base.removeprefix("http://").removesuffix("/v1").partition(":")

    def ask() -> socket.socket:
        caller = socket.create_connection((host, int(port)))
        caller.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        if stream:
            assert b" 200 " in caller.recv(100)
        else:
            wait_for("it runs", lambda: service.running() == 1 or select.select([caller], [], [], 0)[0])
        return caller

    with service.held_amid(ask) as caller:
        caller.close()
        wait_for("its place is free", lambda: service.running() == 0)
    wait_for("its state is gone", lambda: service.sessions() <= sessions)  # earlier ones may have expired
    wait_for("the log has it", lambda: service.cancelled() == cancelled + 1)


def test_too_many_are_told_when_to_come_back(service: Service, client: openai.OpenAI) -> None:
    with contextlib.ExitStack() as streams:

        def begin() -> list[httpx2.Response]:
            streams.close()
            wait_for("nothing runs", lambda: service.running() == 0)
            sent = [service.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) for _ in range(4)]
            return [streams.enter_context(each) for each in sent]

        with service.held_amid(begin, running=4) as answers, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt=PROMPT)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
    assert [answer.status_code for answer in answers] == [200] * 4
    wait_for("all have ended", lambda: service.running() == 0)


def test_two_requests_on_one_connection(service: Service) -> None:
    first = service.post("/v1/completions", prompt=PROMPT, **GREEDY)
    second = service.post("/v1/completions", prompt=PROMPT, **GREEDY)
    assert first.json()["choices"][0]["text"] == second.json()["choices"][0]["text"]
    assert "connection" not in first.headers


@pytest.mark.skipif(BROWSER is None, reason="no chromium here; tests/unit/test_http_page.py runs the page's script")
def test_the_page_shows_a_generation_in_a_browser(service: Service, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "Why should we protect the oceans?"}]
    answer = service.post("/v1/chat/completions", messages=question, temperature=0, max_tokens=96, return_tokens=True)
    (choice,) = answer.json()["choices"]
    with browsing(f"{service.base.removesuffix('v1')}#go", tmp_path) as page:
        page.wait_for(f"document.querySelectorAll('#text span').length >= {len(choice['tokens'])}")
        page.wait_for("!document.getElementById('go').disabled")
        shown = page.value("[...document.querySelectorAll('#text span')].map((piece) => piece.title)")
        kinds = page.value("[...document.querySelectorAll('#rounds i')].map((square) => square.className)")
        assert [int(title.split()[-1]) for title in shown] == [token["id"] for token in choice["tokens"]]
        assert page.value("document.getElementById('text').textContent") == choice["message"]["content"]
        assert page.value("document.getElementById('error').textContent") == ""
        assert page.value("document.querySelectorAll('#rounds div').length") == choice["tandem"]["rounds"]
        rejected = choice["tandem"]["draft_tokens"] - choice["tandem"]["accepted_tokens"]
        assert (kinds.count("rejected"), kinds.count("accepted")) == (rejected, choice["tandem"]["accepted_tokens"])
        points = page.value("document.getElementById('gamma').getAttribute('points').split(' ').length")
        assert points == choice["tandem"]["rounds"]
        # A request that is refused is told on the page.
        page.value("document.getElementById('max-tokens').value = 100000")
        page.value("document.getElementById('form').requestSubmit()")
        page.wait_for("document.getElementById('error').textContent.includes('max')")


def test_the_page_is_served(service: Service) -> None:
    answer = service.http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", readme_blocks("python"))
def test_the_readmes_python_runs(
    service: Service, block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    code = block.replace("127.0.0.1:50051", service.stack.orchestrator.address)
    code = code.replace("http://127.0.0.1:8000/v1", service.base)
    assert code != block
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_the_readmes_curl_works(service: Service) -> None:
    (block,) = [block for block in readme_blocks("sh") if "/v1/chat/completions" in block]
    body = re.search(r"-d '(.*?)'", block, re.DOTALL)
    assert body is not None
    answer = service.http.post("/v1/chat/completions", json=json.loads(body[1]))
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


# Last: it ends the orchestrator.
def test_what_runs_at_sigterm_goes_on_to_its_end(service: Service, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}

    def begin() -> openai.Stream[Any]:
        begun = client.completions.create(stream=True, **fields)
        next(iter(begun))
        return begun

    with service.held_amid(begin) as stream:
        service.stack.orchestrator.signal(signal.SIGTERM)
        wait_for("it is not ready", lambda: service.http.get("/healthz").status_code == 503)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**fields)
    assert caught.value.status_code == 503
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert service.stack.orchestrator.wait() == 0
    assert "Traceback" not in service.stack.orchestrator.log.read_text()
