"""Which orchestrator a command talks to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from tandem.cli.address import Address, parse_address
from tandem.cli.choices import recorded_files
from tandem.cli.encryption import PLAIN_TEXT, from_record, with_absolute_files
from tandem.cli.errors import USAGE, CliError
from tandem.cli.interruptions import Interruptions
from tandem.cli.settings import DEFAULT_LISTEN, EXTERNAL_VARIABLES, listen_variable, stack_home
from tandem.cli.state import StateFile
from tandem.client import TandemClient
from tandem.config import ConfigError
from tandem.transport_security import ClientFiles, client_files


def orchestrator_address(flag: str | None, environment: Mapping[str, str]) -> str:
    """The flag, else the variable, else what runs here, else where it would listen."""
    variable = EXTERNAL_VARIABLES["orchestrator"]
    named = flag or environment.get(variable)
    if named:
        return str(parse_address(named, "--address" if flag else variable).reachable())
    state = StateFile(stack_home(environment)).load()
    if state is not None and state.alive():
        return state.orchestrator_address
    listen = listen_variable("orchestrator")
    return str(parse_address(environment.get(listen) or DEFAULT_LISTEN["orchestrator"], listen).reachable())


@contextlib.contextmanager
def connected(address: str, environment: Mapping[str, str], interruptions: Interruptions) -> Iterator[TandemClient]:
    """`open_client`, closed at the end, neither of them interrupted."""
    with interruptions.held():
        client = open_client(address, environment)
    try:
        yield client
    finally:
        with interruptions.held():
            client.close()


def open_client(address: str, environment: Mapping[str, str]) -> TandemClient:
    """A client with the token and the certificates that the environment names, else with those of what runs here."""
    try:
        tls = client_files(with_absolute_files(environment), "TANDEM_TLS_ORCHESTRATOR")
    except ConfigError as error:
        raise CliError(str(error), USAGE) from error
    if not tls.ca:
        tls = _files_on_record(parse_address(address, "--address"), environment)
    return TandemClient(address, token=environment.get("TANDEM_TOKEN", ""), tls=tls)


def _files_on_record(address: Address, environment: Mapping[str, str]) -> ClientFiles:
    """What the orchestrator that runs here is reached with, if this is where. A record that can't be read says nothing of an address that
    was named, and that of an orchestrator that has ended says nothing of who is there now."""
    try:
        state = StateFile(stack_home(environment)).load()
        here = state is not None and parse_address(state.orchestrator_address, "the record").same_place(address)
    except CliError:
        return PLAIN_TEXT
    if state is None or not here or "orchestrator" not in {service.name for service in state.alive()}:
        return PLAIN_TEXT
    return from_record(recorded_files(state), "orchestrator")
