"""Files that can't be used are refused at start, by the name of their variable; secrets aren't repeated."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc.aio
import pytest

from orchestrator.admission import Admission
from orchestrator.call import GrpcCall
from orchestrator.callers import Caller, Callers, CallersFileError
from orchestrator.errors import InvalidArgument, Overloaded, Unauthenticated
from orchestrator.generation import Generations
from orchestrator.metered_call import MeteredCall
from orchestrator.request import Limits, plan_generation
from orchestrator.session import Session
from orchestrator.token_budget import TokenBudget
from orchestrator.vocabulary import GenerationDefaults
from tandem import grpc_server
from tandem.config import ConfigError
from tandem.transport_security import ClientFiles, ServerFiles
from tandem.v1 import orchestrator_pb2 as api
from tandem.wire import encode_ids
from tests.support.authority import Authority

TOKEN = "a-token-of-enough-characters"


def test_server_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("a", "a.example")
    _, other_key = authority.issue("b", "b.example")
    assert ServerFiles().credentials() is None
    assert ServerFiles(certificate, key).credentials() is not None
    wrong = {
        "TANDEM_TLS_CERTIFICATE needs TANDEM_TLS_KEY": ServerFiles(certificate),
        "TANDEM_TLS_KEY needs TANDEM_TLS_CERTIFICATE": ServerFiles(key=key),
        "TANDEM_TLS_CLIENT_CA needs": ServerFiles(client_ca=certificate),
        "TANDEM_TLS_KEY: .* can't be read": ServerFiles(certificate, str(tmp_path / "nowhere")),
        "no pair": ServerFiles(certificate, other_key),
        "TANDEM_TLS_CLIENT_CA: .* can't be read": ServerFiles(certificate, key, str(tmp_path / "nowhere")),
        "TANDEM_TLS_CLIENT_CA holds no certificates": ServerFiles(certificate, key, key),
    }
    for message, files in wrong.items():
        with pytest.raises(ConfigError, match=message):
            files.credentials()


def test_client_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("a", "a.example")
    ClientFiles().check("TANDEM_X")
    for files in (ClientFiles("", certificate, key), ClientFiles(str(tmp_path / "nowhere")), ClientFiles("x", key=key)):
        with pytest.raises(ConfigError, match="TANDEM_X_"):
            files.check("TANDEM_X")


@pytest.mark.parametrize(
    "text",
    [
        f"[callers.a]\ntoken = '{TOKEN}",
        f"[callers.a]\ntoken = '{TOKEN}'\nmax_runing_requests = 3",
        f"[callers.a]\ntoken = '{TOKEN}'\nmax_running_requests = -1",
        f"[callers.a]\ntoken = '{TOKEN}'\nmax_running_requests = true",
        f"[callers.a]\ntoken = '{TOKEN}'\nmax_tokens_per_request = 1.5",
        f"[callers.a]\ntoken = '{TOKEN}'\nmax_tokens_per_minute = -1",
        f"[callers.a]\ntoken = '{TOKEN}'\n[callers.b]\ntoken = '{TOKEN}'",
        f"[other]\ntoken = '{TOKEN}'",
        f"callers = '{TOKEN}'",
        "[callers.a]\ntoken = 'a-token-of-'",
        "",
    ],
)
def test_a_file_of_callers_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "callers.toml"
    path.write_text(text)
    with pytest.raises(CallersFileError) as caught:
        Callers(str(path))
    error: BaseException | None = caught.value
    while error is not None:
        assert "a-token-of" not in str(error)
        error = error.__cause__


def test_a_missing_file_of_callers_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(CallersFileError, match="can't be read"):
        Callers(str(tmp_path / "nowhere"))


def test_a_caller_is_named_by_its_token(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    path.write_text(f"[callers.a]\ntoken = '{TOKEN}'")
    callers = Callers(str(path))
    with callers.admit([("authorization", f"bearer {TOKEN}")]) as caller:
        assert caller.name == "a"
    refused: list[list[tuple[str, str | bytes]]] = [
        [],
        [("authorization", TOKEN)],
        [("authorization", f"Bearer {TOKEN} ")],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
    ]
    for metadata in refused:
        with pytest.raises(Unauthenticated), callers.admit(metadata):
            pass
    with Callers("").admit([]) as nobody:
        assert nobody.name == ""


def test_completions_count_towards_a_callers_limit(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    path.write_text(f"[callers.a]\ntoken = '{TOKEN}'\nmax_running_requests = 4")
    callers, metadata = Callers(str(path)), [("authorization", f"Bearer {TOKEN}")]
    with callers.admit(metadata, 3):
        with callers.admit(metadata):
            pass
        with pytest.raises(Overloaded), callers.admit(metadata, 2):
            pass
    with pytest.raises(InvalidArgument, match=r"^n: "), callers.admit(metadata, 5):
        pass
    with callers.admit(metadata, 4):
        pass


def test_a_callers_tokens_come_back_with_time() -> None:
    now = 0.0
    budget = TokenBudget(lambda: now)
    budget.allow(60)
    assert budget.seconds_until_left() == 0.0
    budget.spend(59)
    assert budget.seconds_until_left() == 0.0
    budget.spend(31)  # by what was running
    assert budget.seconds_until_left() == pytest.approx(31.0)
    now = 30.0
    assert budget.seconds_until_left() == pytest.approx(1.0)
    now = 31.0
    assert budget.seconds_until_left() == pytest.approx(0.0, abs=1e-9)
    now = 1000.0  # no more than a minute's worth is kept
    assert budget.seconds_until_left() == 0.0
    budget.spend(60)
    assert budget.seconds_until_left() == pytest.approx(1.0)
    budget.allow(600)  # what was used stays used
    assert budget.seconds_until_left() == pytest.approx(0.1)


def test_a_changed_file_forgives_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "callers.toml"
    unlimited = f"[callers.a]\ntoken = '{TOKEN}'\n"
    limited = f"{unlimited}max_tokens_per_minute = 100"
    path.write_text(limited)
    callers, metadata = Callers(str(path)), [("authorization", f"Bearer {TOKEN}")]
    with callers.admit(metadata) as caller:
        callers.spend(caller, 1_000)
    for text, allowed in ((limited + "\n", False), (limited.replace("100", "200"), False), (unlimited, True)):
        path.write_text(text)
        if allowed:
            with callers.admit(metadata):
                pass
            continue
        with pytest.raises(Overloaded) as refusal, callers.admit(metadata):
            pass
        assert refusal.value.reason == "CALLER_TOKENS"
        assert refusal.value.retry_after is not None
        assert refusal.value.retry_after > 60


class Sink(GrpcCall):
    """A call under alice's token that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.sent: list[api.GenerateResponse] = []

    def metadata(self) -> list[tuple[str, str | bytes]]:
        return [("authorization", f"Bearer {TOKEN}")]

    def certificate_name(self) -> str:
        return ""

    def seconds_left(self) -> float | None:
        return None

    async def write(self, response: api.GenerateResponse) -> None:
        self.sent.append(response)


async def test_tokens_that_are_sent_again_cost_nothing() -> None:
    spent: list[int] = []
    sink = Sink()
    call = MeteredCall(sink, spent.append)
    token, again = api.GeneratedToken(kind=api.TOKEN_KIND_BONUS), api.GeneratedToken(kind=api.TOKEN_KIND_REPLAYED)
    start = api.GenerationStart(prompt_tokens=7)
    for index in range(2):
        await call.write(api.GenerateResponse(index=index, start=start, tokens=[again, token, token]))
    await call.write(api.GenerateResponse(index=1, tokens=[token]))
    assert sum(spent) == 5
    assert len(sink.sent) == 3


@pytest.mark.parametrize("completions", [1, 3])
async def test_a_prompt_is_paid_for_once_though_its_caller_cancels_and_comes_back(
    completions: int, tmp_path: Path
) -> None:
    path = tmp_path / "callers.toml"
    path.write_text(f"[callers.alice]\ntoken = '{TOKEN}'\nmax_tokens_per_minute = 1000")
    spent: list[int] = []

    class Noticing(Callers):
        def spend(self, caller: Caller, tokens: int) -> None:
            assert caller.name == "alice"
            spent.append(tokens)

    class Sessions:
        """Of a store that never answers who begins, and holds what was finished elsewhere."""

        def __init__(self) -> None:
            self.unbegun = completions
            self.all_begun = asyncio.Event()

        async def create(self, *_: object) -> Session:
            self.unbegun -= 1
            if self.unbegun == 0:
                self.all_begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def resume(self, *_: object) -> Session:
            request = api.GenerateRequest(token_ids=api.TokenIds(ids=range(7)), max_tokens=4)
            plan = await plan_generation(request, vocabulary, limits)
            return Session(plan, "m", None, encode_ids([1, 2, 3, 4]), finish=api.GenerationFinish())

    vocabulary: Any = SimpleNamespace(decode=lambda ids: "x" * len(ids), defaults=GenerationDefaults())
    limits = Limits(100, 50, 20, 1000, 8, 2, False, frozenset())
    sessions = Sessions()
    runtime = SimpleNamespace(
        callers=Noticing(str(path)),
        admission=Admission(4, 4, 60.0),
        sessions=sessions,
        limits=lambda: limits,
        limits_of_new=lambda: limits,
        vocabulary=vocabulary,
        target_model=lambda: "m",
        reader_timeout=60.0,
    )
    recorders = SimpleNamespace(begin=lambda *_: MagicMock())
    generations = Generations(runtime, recorders)  # type: ignore[arg-type]
    request = api.GenerateRequest(request_id="r", token_ids=api.TokenIds(ids=range(7)), n=completions)
    with pytest.raises(InvalidArgument, match=r"^n: must be at most 8"):
        await generations.run(api.GenerateRequest(token_ids=api.TokenIds(ids=[7]), n=9), Sink())
    first = asyncio.create_task(generations.run(request, Sink()))
    begun = asyncio.create_task(sessions.all_begun.wait())
    await asyncio.wait({first, begun}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert begun.done()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert spent == [7]
    for _ in range(2):
        call = Sink()
        await generations.run(api.GenerateRequest(request_id="r", token_offset=0), call)
        assert call.sent[0].start.prompt_tokens == 7
        assert sum(len(response.tokens) for response in call.sent) == 4
    assert sum(spent) == 7


@pytest.mark.parametrize(
    ("address", "warned"), [("0.0.0.0:0", True), ("[::]:0", True), ("127.0.0.1:0", False), ("localhost:0", False)]
)
async def test_plain_text_to_other_machines_is_warned_of(
    address: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = grpc.aio.server()
    with caplog.at_level(logging.WARNING):
        grpc_server.bind(server, address, "TANDEM_X_LISTEN")
    await server.stop(None)
    assert ("in plain text" in caplog.text) == warned
