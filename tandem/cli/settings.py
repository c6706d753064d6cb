"""What `tandem up` and `tandem demo` read from flags and `TANDEM_*` variables, once."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from tandem.cli.address import Address, parse_address
from tandem.cli.encryption import Encryption, read_encryption, with_absolute_files
from tandem.cli.errors import USAGE, CliError

DEFAULT_LISTEN = {
    "redis": "127.0.0.1:6399",
    "draft": "127.0.0.1:50052",
    "target": "127.0.0.1:50053",
    "orchestrator": "127.0.0.1:50051",
}
# A variable that names running services takes the place of the embedded one.
EXTERNAL_VARIABLES = {
    "redis": "TANDEM_REDIS_URL",
    "draft": "TANDEM_DRAFT_ADDRESSES",
    "target": "TANDEM_TARGET_ADDRESSES",
    "orchestrator": "TANDEM_ORCHESTRATOR_ADDRESS",
}
DEFAULT_MODELS = {"draft": "models/smol-draft", "target": "models/smollm2-135m-instruct"}
# Ports that a service opens where they are named.
FURTHER_LISTENS = frozenset(
    {
        "TANDEM_HTTP_LISTEN",
        *(
            f"TANDEM_{role}_{what}_LISTEN"
            for role in ("DRAFT", "TARGET", "ORCHESTRATOR")
            for what in ("METRICS", "HEALTH")
        ),
    }
)
# How to make a default model that isn't there.
MODEL_TARGETS = {"draft": "git checkout models/smol-draft", "target": "make models"}


@dataclasses.dataclass(frozen=True, slots=True)
class StackSettings:
    """Everything that decides what is started and how."""

    root: Path
    home: Path
    environment: Mapping[str, str]
    listen: Mapping[str, Address]
    external: Mapping[str, tuple[str, ...]]
    encryption: Encryption
    models: Mapping[str, str]
    ready_timeout_seconds: float

    @property
    def logs(self) -> Path:
        return self.home / "logs"


def listen_variable(service: str) -> str:
    """The variable that moves a service to another port."""
    return f"TANDEM_{service.upper()}_LISTEN"


def model_variable(service: str) -> str:
    """The variable that names a service's model."""
    return f"TANDEM_{service.upper()}_MODEL"


def project_root() -> Path:
    """The checkout that this package runs from, so that the commands work in any folder; else the current folder."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()


def stack_home(environment: Mapping[str, str]) -> Path:
    """Where the state of what runs, its logs and the embedded store's data are kept."""
    chosen = environment.get("TANDEM_HOME", "")
    return Path(chosen).expanduser().resolve() if chosen else project_root() / ".tandem"


# Flags that stand for a variable: their names on the parsed arguments, by variable.
_FLAGS = {
    "TANDEM_HOME": "home",
    "TANDEM_READY_TIMEOUT": "ready_timeout",
    "TANDEM_HTTP_LISTEN": "http_listen",
    "TANDEM_REDIS_URL": "redis_url",
    "TANDEM_ORCHESTRATOR_ADDRESS": "orchestrator_address",
    **{f"TANDEM_{service.upper()}_LISTEN": f"{service}_listen" for service in DEFAULT_LISTEN},
    **{f"TANDEM_{service.upper()}_MODEL": f"{service}_model" for service in DEFAULT_MODELS},
    **{f"TANDEM_{service.upper()}_ADDRESSES": f"{service}_addresses" for service in DEFAULT_MODELS},
}


def with_flags(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as if each given flag were its variable: one source for what is read, and for what is started."""
    given = {variable: getattr(arguments, flag, None) for variable, flag in _FLAGS.items()}
    return {**environment, **{variable: value for variable, value in given.items() if value is not None}}


def _check_store(url: str) -> None:
    """Before anything is started; what is wrong with it isn't shown, since it may hold a password."""
    from redis.connection import parse_url

    # Its own probe of the store asks at one address.
    if "+" in url.partition("://")[0]:
        raise CliError(
            "TANDEM_REDIS_URL: give a primary's own address here; Sentinels and clusters are for services", USAGE
        )
    try:
        parse_url(url)  # type: ignore[no-untyped-call]  # redis has types for a part of itself
    except ValueError as error:
        raise CliError(
            "TANDEM_REDIS_URL is no address of a store: expected redis://host:port/0, or rediss://", USAGE
        ) from error


def _readable(environment: Mapping[str, str]) -> dict[str, str]:
    """Empty variables are unset, and a port alone is on loopback, for the services too, which want host:port."""
    given = {name: value for name, value in environment.items() if value or not name.startswith("TANDEM_")}
    for name in FURTHER_LISTENS.intersection(given):
        given[name] = str(parse_address(given[name], name))
    return given


def load_settings(environment: Mapping[str, str]) -> StackSettings:
    """Reads and validates the variables; raises CliError that names the one at fault."""
    root = project_root()
    environment = with_absolute_files(_readable(environment))
    external = {
        service: _external(environment, service)
        for service in EXTERNAL_VARIABLES
        if environment.get(EXTERNAL_VARIABLES[service], "").strip()
    }
    return StackSettings(
        root=root,
        home=stack_home(environment),
        environment=environment,
        listen={
            service: parse_address(environment.get(listen_variable(service)) or default, listen_variable(service))
            for service, default in DEFAULT_LISTEN.items()
        },
        external=external,
        encryption=read_encryption(environment, external),
        models={service: _model(environment, service, root) for service in DEFAULT_MODELS},
        ready_timeout_seconds=_seconds(environment, "TANDEM_READY_TIMEOUT", 180.0),
    )


def default_threads(service: str, environment: Mapping[str, str]) -> int:
    """Torch threads of a worker; 0: as many as torch finds cores.

    Draft and target take turns at the same request, so each may have all cores, but a small draft gains nothing from more
    than two. A draft that works ahead runs at the same time, and then they must not fight for cores.
    """
    cores = os.cpu_count() or 1
    if environment.get("TANDEM_DRAFT_AHEAD_ROWS", "").strip() not in ("", "0"):
        return 1 if service == "draft" else max(1, cores // 2)
    return min(2, cores) if service == "draft" else 0


def _external(environment: Mapping[str, str], service: str) -> tuple[str, ...]:
    variable = EXTERNAL_VARIABLES[service]
    value = environment[variable].strip()
    if service == "redis":
        _check_store(value)
        return (value,)
    addresses = tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(str(parse_address(address, variable)) for address in addresses)


def _model(environment: Mapping[str, str], service: str, root: Path) -> str:
    """A local folder as an absolute path, since services run in the checkout; a name as it is."""
    chosen = environment.get(model_variable(service), "").strip()
    if not chosen:
        return str(root / DEFAULT_MODELS[service])
    path = Path(chosen).expanduser()
    return str(path.resolve()) if path.exists() or chosen.startswith((".", "~", "/")) else chosen


def _seconds(environment: Mapping[str, str], variable: str, default: float) -> float:
    text = environment.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise CliError(f"{variable}={text!r} is not a time: expected seconds above 0", USAGE)
    return seconds
