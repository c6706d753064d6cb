"""What the services of a local stack are reached with, by each other and by the command line: certificates, or plain text.

The services read their `TANDEM_TLS_*` variables themselves; this is for those who ask them whether they are ready, and finds out
before anything is started whether they would find to one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tandem.cli.errors import USAGE, CliError
from tandem.config import ConfigError
from tandem.transport_security import ClientFiles, ServerFiles, client_files

PLAIN_TEXT = ClientFiles()
_SERVED = ("TANDEM_TLS_CERTIFICATE", "TANDEM_TLS_KEY", "TANDEM_TLS_CLIENT_CA")
_EDGES = {
    "draft": "TANDEM_TLS_WORKER",
    "target": "TANDEM_TLS_WORKER",
    "orchestrator": "TANDEM_TLS_ORCHESTRATOR",
    "redis": "TANDEM_TLS_REDIS",
}
"""How the variables begin that name what a service is reached with."""
_PARTS = ("CA", "CERTIFICATE", "KEY")
FILE_VARIABLES = (*_SERVED, *(f"{edge}_{part}" for edge in dict.fromkeys(_EDGES.values()) for part in _PARTS))


@dataclasses.dataclass(frozen=True, slots=True)
class Encryption:
    """The files that each service is reached with; without a CA: plain text."""

    draft: ClientFiles = PLAIN_TEXT
    target: ClientFiles = PLAIN_TEXT
    orchestrator: ClientFiles = PLAIN_TEXT
    redis: ClientFiles = PLAIN_TEXT

    def of(self, service: str) -> ClientFiles:
        """Of one of the four."""
        files: ClientFiles = getattr(self, service)
        return files

    def on_record(self) -> dict[str, str]:
        """What is named, by variable, for the state of what runs."""
        return {
            f"{edge}_{part}": path
            for service, edge in _EDGES.items()
            for part, path in zip(_PARTS, dataclasses.astuple(self.of(service)), strict=True)
            if path
        }


def with_absolute_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Services run in another folder than the one that the files were named in."""
    named = {name: environment[name] for name in (*FILE_VARIABLES, "TANDEM_CALLERS_FILE") if environment.get(name)}
    return {**environment, **{name: str(Path(path).expanduser().absolute()) for name, path in named.items()}}


def from_record(recorded: Mapping[str, str], service: str) -> ClientFiles:
    """The files for a service, from what `on_record` gave."""
    return ClientFiles(*(recorded.get(f"{_EDGES[service]}_{part}", "") for part in _PARTS))


def read_encryption(environment: Mapping[str, str], external: Container[str]) -> Encryption:
    """Of a stack that starts what isn't `external`. Raises CliError that names the variable at fault, or the one that is missing."""
    try:
        if "orchestrator" in external:
            return Encryption(orchestrator=client_files(environment, _EDGES["orchestrator"]))
        served = ServerFiles(*(environment.get(name, "") for name in _SERVED))
        served.credentials()
        workers = client_files(environment, _EDGES["draft"])
        # A command that reaches an encrypted orchestrator elsewhere may leave its files named.
        caller = client_files(environment, _EDGES["orchestrator"]) if served.certificate else PLAIN_TEXT
        store = client_files(environment, _EDGES["redis"])
    except ConfigError as error:
        raise CliError(str(error), USAGE) from error
    if "draft" not in external or "target" not in external:
        _fits(served, workers, _EDGES["draft"], "the orchestrator reaches the workers that are started here")
        if workers.ca and not served.certificate:
            raise CliError(
                "TANDEM_TLS_WORKER_CA: the workers that are started here would speak plain text; set TANDEM_TLS_CERTIFICATE",
                USAGE,
            )
    _fits(served, caller, _EDGES["orchestrator"], "this command reaches the orchestrator")
    if store.ca:
        _check_store(environment.get("TANDEM_REDIS_URL", ""))
    return Encryption(workers, workers, caller, store)


def _fits(served: ServerFiles, files: ClientFiles, edge: str, who: str) -> None:
    if served.certificate and not files.ca:
        raise CliError(f"TANDEM_TLS_CERTIFICATE: {who} over TLS then; set {edge}_CA", USAGE)
    if served.client_ca and not files.certificate:
        raise CliError(f"TANDEM_TLS_CLIENT_CA: {who} with a certificate then; set {edge}_CERTIFICATE", USAGE)


def _check_store(url: str) -> None:
    if not url.strip():
        raise CliError(
            "TANDEM_TLS_REDIS_CA: the embedded store speaks plain text, on this machine alone; "
            "name an encrypted one in TANDEM_REDIS_URL",
            USAGE,
        )
    if not urlsplit(url).scheme.startswith("rediss"):
        raise CliError("TANDEM_TLS_REDIS_CA: TANDEM_REDIS_URL asks for no TLS; that begins with rediss://", USAGE)
