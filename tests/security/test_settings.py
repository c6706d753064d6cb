"""Files that can't be used are refused at start, by the name of their variable; secrets aren't repeated."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc.aio
import pytest

from orchestrator.callers import Callers, CallersFileError
from orchestrator.errors import InvalidArgument, Overloaded, Unauthenticated
from tandem import grpc_server
from tandem.config import ConfigError
from tandem.transport_security import ClientFiles, ServerFiles
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
    with callers.admit([("authorization", f"bearer {TOKEN}")]) as name:
        assert name == "a"
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
        assert nobody == ""


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
