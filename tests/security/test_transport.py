"""TLS with certificates on both sides on every edge, tokens of callers, and nothing secret in a log."""

from __future__ import annotations

import contextlib
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.client import (
    FinishedError,
    GenerationOptions,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    SamplingChange,
    TandemClient,
    TandemError,
    UnauthenticatedError,
    UnavailableError,
)
from tandem.grpc_server import LIVENESS
from tandem.transport_security import ClientFiles
from tandem.v1 import draft_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc, target_pb2_grpc
from tests.support.authority import Authority, server_context
from tests.support.channels import open_channel
from tests.support.generation import paced_channel, request
from tests.support.ports import free_port
from tests.support.redis_servers import kinds
from tests.support.services import MODELS, Stack, running_stack
from tests.support.tls_proxy import TlsProxy

HOST = "127.0.0.1"
ALICE, BOB, CAROL = "token-of-alice-1234567890", "token-of-bob-0987654321", "token-of-carol-1122334455"
PASSWORD = "password-of-the-store"
PROMPT = "an unmistakable zyzzyva of a prompt"
SERVICES: dict[str, Callable[[grpc.Channel], Any]] = {
    "orchestrator": lambda channel: orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate,
    "draft": lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose,
    "target": lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify,
}
OPTIONS = GenerationOptions(max_tokens=12, temperature=0.0, ignore_eos=True, num_speculative_tokens=2)


def _callers(path: Path, *, alice: str = ALICE, bob: str | None = BOB, limit: int = 1) -> None:
    text = f'[callers.alice]\ntoken = "{alice}"\nmax_running_requests = {limit}\n'
    text += f'[callers.carol]\ntoken = "{CAROL}"\nmax_tokens_per_request = 20\nmax_tokens_per_minute = 10\n'
    path.write_text(text if bob is None else f'{text}[callers.bob]\ntoken = "{bob}"\n')


@dataclass
class Deployment:
    stack: Stack
    authority: Authority
    callers: Path
    redis: TlsProxy
    store_context: ssl.SSLContext
    folder: Path
    http_address: str
    health: dict[str, str]
    """By role: where probes ask in plain text."""

    def http(self, files: ClientFiles, token: str | None = ALICE) -> httpx2.Client:
        context = ssl.create_default_context(cafile=files.ca)
        if files.certificate:
            context.load_cert_chain(files.certificate, files.key)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx2.Client(
            base_url=f"https://{self.http_address}", verify=context, headers=headers, timeout=90, trust_env=False
        )

    def client(self, token: str = ALICE, files: ClientFiles | None = None) -> TandemClient:
        return TandemClient(self.stack.orchestrator.address, token=token, tls=files or self.stack.orchestrator.security)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "inside")
    certificate, key = authority.issue("service", HOST, "localhost")
    ca = str(authority.folder / "ca.pem")
    callers = folder / "callers.toml"
    _callers(callers)
    http_address = f"{HOST}:{free_port()}"
    health = {role: f"{HOST}:{free_port()}" for role in ("orchestrator", "draft", "target")}
    server = kinds()[0].create(folder / "redis")
    server.start()
    server.command("CONFIG", "SET", "requirepass", PASSWORD)
    store_context = server_context(ca, certificate, key)
    with contextlib.closing(server), TlsProxy(store_context, server.port) as redis:
        environment = {
            "TANDEM_TLS_CERTIFICATE": certificate,
            "TANDEM_TLS_KEY": key,
            "TANDEM_TLS_CLIENT_CA": ca,
            "TANDEM_TLS_WORKER_CA": ca,
            "TANDEM_TLS_WORKER_CERTIFICATE": certificate,
            "TANDEM_TLS_WORKER_KEY": key,
            "TANDEM_TLS_REDIS_CA": ca,
            "TANDEM_TLS_REDIS_CERTIFICATE": certificate,
            "TANDEM_TLS_REDIS_KEY": key,
            "TANDEM_REDIS_URL": f"rediss://:{PASSWORD}@{HOST}:{redis.port}/0",
            "TANDEM_CALLERS_FILE": str(callers),
            "TANDEM_LOG_LEVEL": "DEBUG",
            "TANDEM_HTTP_LISTEN": http_address,
            **{f"TANDEM_{role.upper()}_HEALTH_LISTEN": address for role, address in health.items()},
        }
        files = authority.client("caller", "caller.example")
        with running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment, security=files) as stack:
            yield Deployment(stack, authority, callers, redis, store_context, folder, http_address, health)


def _text(client: TandemClient, **fields: Any) -> str:
    return "".join(chunk.text for chunk in client.generate(PROMPT, OPTIONS, timeout=90, **fields))


def test_every_edge_is_encrypted_and_the_answer_is_whole(deployment: Deployment) -> None:
    with deployment.client() as client:
        chunks = list(client.generate(PROMPT, OPTIONS, timeout=90))
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.completion_tokens == 12
    assert finish.speculation.degraded_rounds == 0
    assert finish.speculation.draft_tokens > 0
    assert deployment.redis.accepted > 0


def _strangers(deployment: Deployment) -> dict[str, ClientFiles]:
    other = Authority(deployment.folder / "outside")
    ca = deployment.stack.orchestrator.security.ca
    return {
        "plain text": ClientFiles(),
        "no certificate": ClientFiles(ca),
        "another CA's certificate": ClientFiles(ca, *other.issue("stranger", "caller.example")),
        "trusts another CA": ClientFiles(
            str(other.folder / "ca.pem"), *deployment.authority.issue("again", "x.example")
        ),
    }


@pytest.mark.parametrize("role", ["orchestrator", "draft", "target"])
def test_strangers_get_in_nowhere(deployment: Deployment, role: str) -> None:
    service = getattr(deployment.stack, role)
    assert service.serving(seconds=60)
    for name, files in _strangers(deployment).items():
        credentials = files.credentials()
        channel = open_channel(service.address, credentials=credentials, patient=False)
        with channel, pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE, name  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", ["orchestrator", "draft", "target"])
def test_probes_are_answered_in_plain_text_and_nothing_else_is(deployment: Deployment, role: str) -> None:
    with open_channel(deployment.health[role]) as channel:
        for name in ("", LIVENESS):
            request = health_pb2.HealthCheckRequest(service=name)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        message = orchestrator_pb2.GenerateRequest() if role == "orchestrator" else iter(())
        with pytest.raises(grpc.RpcError) as caught:
            next(SERVICES[role](channel)(message, timeout=60))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


@pytest.mark.parametrize("token", ["", "token-of-nobody-1234567890", ALICE + "x", ALICE[:-1]])
def test_a_caller_needs_a_token_that_is_known(deployment: Deployment, token: str) -> None:
    with deployment.client(token) as client, pytest.raises(UnauthenticatedError) as caught:
        _text(client)
    assert "token" in str(caught.value).lower()
    assert ALICE not in str(caught.value)


BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def test_http_wants_the_same_certificate_and_the_same_token(deployment: Deployment) -> None:
    files = deployment.stack.orchestrator.security
    with deployment.client() as client, deployment.http(files) as http:
        answer = http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, _text(client))
    for token in (None, ALICE[:-1], "token-of-nobody-1234567890"):
        with deployment.http(files, token) as http:
            # No byte of the body is looked at for somebody who isn't known.
            for refused in (http.post("/v1/completions", content=b"{"), http.get("/v1/models"), http.get("/metrics")):
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
                assert refused.json()["error"]["type"] == "authentication_error"
            assert http.get("/healthz").status_code == 200
    for name, stranger in _strangers(deployment).items():
        if stranger.ca:
            with deployment.http(stranger) as http, pytest.raises(httpx2.TransportError):
                http.get("/healthz")
                raise AssertionError(name)
    with httpx2.Client(trust_env=False) as http, pytest.raises(httpx2.TransportError):
        http.get(f"http://{deployment.http_address}/healthz")


def test_a_callers_limit_holds_over_http_too(deployment: Deployment) -> None:
    files = deployment.stack.orchestrator.security
    with deployment.http(files) as http, deployment.client() as client:
        for _ in range(5):
            _wait(lambda: bool(_text_or_none(client)))
            if (refused := _refusal_amid_a_stream(deployment, http)) is not None:
                break
        else:
            raise AssertionError("it was over each time")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "caller_limit")
        _wait(lambda: bool(_text_or_none(client)))


def _refusal_amid_a_stream(deployment: Deployment, http: httpx2.Client) -> httpx2.Response | None:
    """What a second request is told; None where the first one was over before, since this process was held up."""
    body = {**BODY, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as running:
        events = running.iter_raw()  # kept: when it goes, so does the connection
        next(events)
        with _held(deployment), contextlib.suppress(httpx2.ReadTimeout):
            return http.post("/v1/completions", json=BODY, timeout=30)
    return None


def test_a_caller_has_a_limit_of_its_own(deployment: Deployment) -> None:
    with deployment.client(ALICE) as alice, deployment.client(BOB) as bob:
        with _paced_request(deployment, ALICE):
            with _held(deployment), pytest.raises(OverloadedError) as caught:
                _text(alice)
            assert caught.value.reason == "CALLER_LIMIT"
            _wait(lambda: bool(_text_or_none(bob, (UnavailableError,))))
        _wait(lambda: bool(_text_or_none(alice)))


def test_a_caller_has_so_many_tokens(deployment: Deployment) -> None:
    with deployment.client(CAROL) as carol, deployment.client(BOB) as bob:
        with pytest.raises(InvalidRequestError, match="max_tokens: must be 1 to 20"):
            list(carol.generate(PROMPT, GenerationOptions(max_tokens=21), timeout=90))
        # As many as it may have, which is more than a minute's, so that nothing is left for a while.
        *_, last = carol.generate(PROMPT, GenerationOptions(ignore_eos=True), timeout=90)
        assert last.finish is not None
        assert last.finish.completion_tokens == 20
        with pytest.raises(OverloadedError) as caught:
            _text(carol)
        assert caught.value.reason == "CALLER_TOKENS"
        assert caught.value.retry_after_seconds is not None
        assert caught.value.retry_after_seconds > 30
        with deployment.http(deployment.stack.orchestrator.security, CAROL) as http:
            refused = http.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "caller_tokens")
            assert int(refused.headers["retry-after"]) > 30
            assert http.get("/v1/models").status_code == 200
        assert _text(bob)


@contextlib.contextmanager
def _paced_request(deployment: Deployment, token: str) -> Iterator[None]:
    """A request that is under way, and not over before it is cancelled: nothing of it is read."""
    orchestrator = deployment.stack.orchestrator
    with paced_channel(orchestrator.address, orchestrator.security.credentials()) as channel:
        running = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(
            request(PROMPT, max_tokens=900, ignore_eos=True),
            metadata=(("authorization", f"Bearer {token}"),),
            timeout=300,
        )
        next(running)
        yield
        running.cancel()


@contextlib.contextmanager
def _held(deployment: Deployment) -> Iterator[None]:
    """The target waits, so that no request comes to its end."""
    deployment.stack.target.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        deployment.stack.target.signal(signal.SIGCONT)


def _text_or_none(
    client: TandemClient, passing: tuple[type[TandemError], ...] = (OverloadedError, UnavailableError)
) -> str | None:
    """None where it fails as it may for a while: a target that was held may be missed for a moment."""
    try:
        return _text(client)
    except passing:
        return None


def _wait(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_request_belongs_to_its_caller(deployment: Deployment) -> None:
    with deployment.client(ALICE) as alice, deployment.client(BOB) as bob:
        whole = _text(alice, request_id="alice-s")
        with pytest.raises(NotFoundError):
            next(bob.resume("alice-s", 0))
        with pytest.raises(NotFoundError):
            bob.update_sampling("alice-s", SamplingChange(temperature=0.5))
        with pytest.raises(FinishedError):
            alice.update_sampling("alice-s", SamplingChange(temperature=0.5))
        with deployment.client("") as nobody, pytest.raises(UnauthenticatedError):
            nobody.update_sampling("alice-s", SamplingChange(temperature=0.5))
        assert "".join(chunk.text for chunk in alice.resume("alice-s", 0)) == whole


def test_the_file_of_callers_is_read_again(deployment: Deployment) -> None:
    new = "token-of-alice-after-the-change"
    with deployment.client(ALICE) as before, deployment.client(new) as after:
        assert _text(before)
        _callers(deployment.callers, alice=new, bob=None, limit=0)
        assert _text(after)
        with pytest.raises(UnauthenticatedError):
            _text(before)
        # One that can't be used changes nothing.
        deployment.callers.write_text(f'[callers.alice]\ntoken = "{new}')
        assert _text(after)
        _callers(deployment.callers)
        assert _text(before)


def test_renewed_certificates_are_followed(deployment: Deployment) -> None:
    """The whole CA is replaced, under the same names: what is connected stays, new connections need the new one."""
    inside, old = deployment.authority.folder, deployment.stack.orchestrator.security
    with deployment.client() as connected:
        assert _text(connected)
        former = ClientFiles(
            *(str(_copied(Path(path), deployment.folder / "former")) for path in (old.ca, old.certificate, old.key))
        )
        # A half of the change, as between two writes: certificate and key are no pair.
        renewed = Authority(deployment.folder / "renewed")
        renewed.issue("service", HOST, "localhost")
        (inside / "service.pem").write_bytes((renewed.folder / "service.pem").read_bytes())
        with deployment.client() as client:
            assert _text(client)
        renewed.issue("caller", "caller.example")
        for name in ("service.pem", "service.key", "ca.pem", "caller.pem", "caller.key"):
            (inside / name).write_bytes((renewed.folder / name).read_bytes())
        # The store follows too: the orchestrator may need another connection to it at any time.
        deployment.store_context.load_cert_chain(inside / "service.pem", inside / "service.key")
        deployment.store_context.load_verify_locations(inside / "ca.pem")
        with deployment.client() as client:
            assert _text(client)
        with deployment.client(files=former) as client, pytest.raises(UnavailableError):
            _text(client)
        _wait(lambda: _healthy(deployment, old))
        assert not _healthy(deployment, former)
        assert not _healthy(deployment, ClientFiles(old.ca, former.certificate, former.key))
        assert _text(connected)
    # The orchestrator's own side: a draft that comes back has the new certificate.
    deployment.stack.draft.kill()
    deployment.stack.draft.start()
    deployment.stack.draft.wait_serving()
    _wait(lambda: not _degraded(deployment))


def _healthy(deployment: Deployment, files: ClientFiles) -> bool:
    """Over HTTP."""
    try:
        with deployment.http(files) as http:
            return http.get("/healthz").status_code == 200
    except httpx2.TransportError:
        return False


def _copied(path: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / path.name).write_bytes(path.read_bytes())
    return folder / path.name


def _degraded(deployment: Deployment) -> int:
    with deployment.client() as client:
        finish = list(client.generate(PROMPT, OPTIONS, timeout=90))[-1].finish
    assert finish is not None
    return finish.speculation.degraded_rounds


def test_nothing_secret_is_in_a_log(deployment: Deployment) -> None:
    """The last one, so that the logs hold all of the above, at DEBUG."""
    with deployment.client() as client:
        text = _text(client)
    logs = {path: path.read_text() for path in deployment.folder.glob("*.log")}
    assert len(logs) == 3
    assert all("request ended" in log or "orchestrator" not in path.name for path, log in logs.items())
    assert "file of callers can't be used" in logs[deployment.folder / "orchestrator.log"]
    keys = [
        part for part in Path(deployment.stack.orchestrator.security.key).read_text().split("\n") if "--" not in part
    ]
    for secret in (ALICE, BOB, "token-of", PASSWORD, "zyzzyva", text, *filter(None, keys)):
        assert not any(secret in log for log in logs.values()), secret
