"""Which orchestrator a command talks to."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.cli.address import parse_address
from tandem.cli.choices import recorded_files
from tandem.cli.encryption import from_record
from tandem.cli.errors import USAGE, CliError
from tandem.cli.settings import DEFAULT_LISTEN, EXTERNAL_VARIABLES, listen_variable, stack_home
from tandem.cli.state import StateFile
from tandem.client import TandemClient
from tandem.config import ConfigError
from tandem.transport_security import client_files


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


def open_client(address: str, environment: Mapping[str, str]) -> TandemClient:
    """A client with the token and the certificates that the environment names, else with those of what runs here."""
    try:
        tls = client_files(environment, "TANDEM_TLS_ORCHESTRATOR")
    except ConfigError as error:
        raise CliError(str(error), USAGE) from error
    if not tls.ca:
        state = StateFile(stack_home(environment)).load()
        if state is not None and state.orchestrator_address == address:
            tls = from_record(recorded_files(state), "orchestrator")
    return TandemClient(address, token=environment.get("TANDEM_TOKEN", ""), tls=tls)
