"""What a command reaches an orchestrator with: the certificates that it is told of, or those of what runs here, and of nothing that doesn't
run any more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tandem.cli.address import parse_address
from tandem.cli.encryption import Encryption
from tandem.cli.main import main
from tandem.cli.processes import ProcessIdentity, identify
from tandem.cli.state import RunningService, StackState, StateFile
from tandem.transport_security import ClientFiles
from tandem.v1 import orchestrator_pb2_grpc
from tests.cli.fake_orchestrator import FakeOrchestrator
from tests.support.authority import Authority

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> ClientFiles:
    return ClientFiles(str(authority.folder / "ca.pem"))


@pytest.fixture(scope="module")
def encrypted(authority: Authority) -> Iterator[int]:
    """The port of an orchestrator that speaks TLS alone."""
    certificate, key = (Path(path).read_bytes() for path in authority.issue("service", HOST, "localhost"))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(FakeOrchestrator(), server)
    port = server.add_secure_port(f"{HOST}:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    yield port
    server.stop(None)


@pytest.fixture
def answered(tmp_path: Path) -> Callable[..., bool]:
    """Whether `tandem generate` with this home folder gets an answer."""

    def generate(*flags: str, **variables: str) -> bool:
        return main(["generate", "--timeout=60", *flags, "Why?"], {"TANDEM_HOME": str(tmp_path), **variables}) == 0

    return generate


@pytest.fixture
def record(tmp_path: Path, files: ClientFiles) -> Callable[..., None]:
    """Writes what `tandem up` would have on record of an orchestrator: of one that runs, or has ended since."""

    def write(address: str, *, alive: bool = True) -> None:
        process = identify(os.getpid()) if alive else ProcessIdentity(os.getpid(), "of another boot")
        assert process is not None
        choices = {f"tls {name}": path for name, path in Encryption(orchestrator=files).on_record().items()}
        service = RunningService("orchestrator", process, address, "", "")
        StateFile(tmp_path).save(StackState("up", process, address, choices, (service,)))

    return write


@pytest.mark.parametrize("named", ["127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0"])
@pytest.mark.parametrize("recorded", ["127.0.0.1", "localhost"])
def test_what_runs_here_is_known_by_any_name_of_this_machine(record, answered, encrypted, recorded, named):
    record(f"{recorded}:{encrypted}")
    assert answered(f"--address={named}:{encrypted}")


def test_what_runs_here_needs_no_address(record, answered, encrypted):
    record(f"{HOST}:{encrypted}")
    assert answered()


def test_the_certificates_of_what_runs_here_are_for_nobody_else(record, answered, encrypted, orchestrator):
    record(f"{HOST}:{encrypted}")
    assert answered(f"--address={orchestrator.address}")


def test_a_record_of_what_has_ended_says_nothing_of_who_is_there_now(record, answered, orchestrator):
    record(orchestrator.address, alive=False)
    assert answered(f"--address={orchestrator.address}")
    assert answered(TANDEM_ORCHESTRATOR_ADDRESS=orchestrator.address)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", None])
def test_a_record_that_cannot_be_read_is_in_the_way_only_where_it_is_needed(
    answered, orchestrator, tmp_path, content, capsys
):
    if content is None:
        (tmp_path / "state.json").mkdir()
    else:
        (tmp_path / "state.json").write_bytes(content)
    assert answered(f"--address={orchestrator.address}")
    assert not answered()
    assert "state.json can't be read" in capsys.readouterr().err


def test_certificates_may_be_named_from_the_home_folder(answered, encrypted, authority, monkeypatch):
    monkeypatch.setenv("HOME", str(authority.folder))
    assert answered(f"--address={HOST}:{encrypted}", TANDEM_TLS_ORCHESTRATOR_CA="~/ca.pem")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("localhost:1", "[::1]:1", True),
        ("127.0.0.1:1", "[::]:1", True),
        ("1", "localhost:1", True),
        ("127.0.0.1:1", "127.0.0.1:2", False),
        ("127.0.0.1:1", "10.0.0.1:1", False),
        ("Host.example:1", "host.EXAMPLE:1", True),
    ],
)
def test_two_names_of_one_place(one, other, same):
    assert parse_address(one, "A").same_place(parse_address(other, "B")) is same
