"""Which services a stack consists of, and how each is started: settings in, commands and environments out."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tandem.cli.address import Address, parse_address
from tandem.cli.embedded_redis import embedded_redis_command
from tandem.cli.encryption import PLAIN_TEXT
from tandem.cli.errors import CliError
from tandem.cli.settings import (
    DEFAULT_MODELS,
    FURTHER_LISTENS,
    MODEL_TARGETS,
    StackSettings,
    default_threads,
    listen_variable,
    model_variable,
)
from tandem.transport_security import ClientFiles

_DRAFT_START = "TANDEM_DRAFT_START_SECONDS"
_DRAFT_METHOD = "TANDEM_DRAFT_METHOD"
_DEFAULT_METHOD = "model+ngram"
"""A service of its own drafts with its model alone by default. n-grams cost nothing, and where an answer repeats its prompt they bring far
more than a small model (README, How fast)."""
_GAMMA = "TANDEM_NUM_SPECULATIVE_TOKENS"
_ADAPTIVE = "TANDEM_ADAPTIVE_SPECULATIVE_TOKENS"


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """How a service is asked whether it is ready. Any one of several addresses is enough."""

    kind: Literal["grpc", "redis"]
    addresses: tuple[str, ...]
    tls: ClientFiles = PLAIN_TEXT


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to start."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    listen: Address
    listen_variable: str
    endpoint: Endpoint
    detail: str = ""
    further_listens: Mapping[str, Address] = dataclasses.field(default_factory=dict)
    """By variable, where it has more ports."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExternalService:
    """A running service that is used as it is."""

    name: str
    endpoint: Endpoint


@dataclasses.dataclass(frozen=True, slots=True)
class StackPlan:
    """What to start, in this order, and what to use that is there already."""

    services: tuple[ServiceSpec, ...]
    external: tuple[ExternalService, ...]
    orchestrator_address: str


def plan_stack(settings: StackSettings) -> StackPlan:
    """Plans the stack; raises CliError if a model folder is missing.

    A running orchestrator has its own workers and store, so with one named there is nothing to start.
    """
    if "orchestrator" in settings.external:
        address = settings.external["orchestrator"][0]
        endpoint = Endpoint("grpc", (address,), settings.encryption.orchestrator)
        return StackPlan((), (ExternalService("orchestrator", endpoint),), address)
    external = tuple(
        ExternalService(name, Endpoint("redis" if name == "redis" else "grpc", addresses, settings.encryption.of(name)))
        for name, addresses in settings.external.items()
    )
    services = []
    if "redis" not in settings.external:
        services.append(_redis(settings))
    services.extend(_worker(settings, name) for name in ("draft", "target") if name not in settings.external)
    services.append(_orchestrator(settings))
    return StackPlan(tuple(services), external, str(settings.listen["orchestrator"].reachable()))


def _redis(settings: StackSettings) -> ServiceSpec:
    listen = settings.listen["redis"]
    return ServiceSpec(
        name="redis",
        command=embedded_redis_command(listen, settings.home / "redis"),
        environment={},
        listen=listen,
        listen_variable=listen_variable("redis"),
        endpoint=Endpoint("redis", (_redis_url(settings),)),
        detail="embedded Valkey",
    )


def _worker(settings: StackSettings, name: str) -> ServiceSpec:
    model = settings.models[name]
    _require_model(settings, name)
    threads = f"TANDEM_{name.upper()}_THREADS"
    environment = {
        model_variable(name): model,
        threads: settings.environment.get(threads) or str(default_threads(name, settings.environment)),
    }
    if name == "draft":
        environment[_DRAFT_METHOD] = settings.environment.get(_DRAFT_METHOD) or _DEFAULT_METHOD
    return _python_service(settings, name, f"{name}_service", environment, detail=Path(model).name)


def _orchestrator(settings: StackSettings) -> ServiceSpec:
    return _python_service(
        settings,
        "orchestrator",
        "orchestrator",
        {
            "TANDEM_DRAFT_ADDRESSES": _worker_addresses(settings, "draft"),
            "TANDEM_TARGET_ADDRESSES": _worker_addresses(settings, "target"),
            "TANDEM_REDIS_URL": _redis_url(settings),
            # As long as it is waited for, so that a draft that doesn't fit is found here and not by its missing speed.
            _DRAFT_START: settings.environment.get(_DRAFT_START) or f"{settings.ready_timeout_seconds:g}",
            **_tokenizer(settings),
            **_gamma(settings),
        },
    )


def _tokenizer(settings: StackSettings) -> dict[str, str]:
    """The target's own, unless another one is named."""
    if settings.environment.get("TANDEM_TOKENIZER"):
        return {}
    return {
        "TANDEM_TOKENIZER": settings.models["target"],
        "TANDEM_TOKENIZER_GGUF_FILE": settings.environment.get("TANDEM_TARGET_GGUF_FILE", ""),
    }


def _gamma(settings: StackSettings) -> dict[str, str]:
    """Of requests that name none. A service's own default is for a target far larger than its draft; the demo's pair on one machine loses with
    it, and which gamma pays there depends on the prompt and the machine (README, How fast)."""
    demo_pair = all(
        name not in settings.external and settings.models[name] == str(settings.root / folder)
        for name, folder in DEFAULT_MODELS.items()
    )
    if not demo_pair or settings.environment.get(_GAMMA) or settings.environment.get(_ADAPTIVE):
        return {}
    return {_ADAPTIVE: "true"}


def _python_service(
    settings: StackSettings, name: str, module: str, environment: Mapping[str, str], detail: str = ""
) -> ServiceSpec:
    listen = settings.listen[name]
    return ServiceSpec(
        name=name,
        command=(sys.executable, "-m", module),
        environment={
            listen_variable(name): str(listen),
            "TANDEM_LOG_FORMAT": settings.environment.get("TANDEM_LOG_FORMAT") or "text",
            # A log that ends before the failure explains nothing.
            "PYTHONUNBUFFERED": "1",
            **environment,
        },
        listen=listen,
        listen_variable=listen_variable(name),
        endpoint=Endpoint("grpc", (str(listen.reachable()),), settings.encryption.of(name)),
        detail=detail,
        further_listens=_further_listens(settings, name),
    )


def _further_listens(settings: StackSettings, name: str) -> dict[str, Address]:
    own = {variable for variable in FURTHER_LISTENS if variable.startswith(f"TANDEM_{name.upper()}_")}
    if name == "orchestrator":
        own.add("TANDEM_HTTP_LISTEN")
    return {
        variable: parse_address(settings.environment[variable], variable)
        for variable in sorted(own.intersection(settings.environment))
    }


def _redis_url(settings: StackSettings) -> str:
    if "redis" in settings.external:
        return settings.external["redis"][0]
    return f"redis://{settings.listen['redis'].reachable()}/0"


def _worker_addresses(settings: StackSettings, name: str) -> str:
    return ",".join(settings.external.get(name) or (str(settings.listen[name].reachable()),))


def _require_model(settings: StackSettings, name: str) -> None:
    """Fails early and in words where the model is a folder; a hub's name is left to the service."""
    path = Path(settings.models[name])
    if not path.is_absolute():
        return
    if path == settings.root / DEFAULT_MODELS[name] and not path.exists():
        raise CliError(
            f"the {name} model is missing: {path} (run `{MODEL_TARGETS[name]}`, or set {model_variable(name)})"
        )
    if not path.is_dir():
        raise CliError(f"the {name} model is missing: {model_variable(name)}={path} is not a folder")
    if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
        raise CliError(f"{model_variable(name)}={path} holds no model: neither config.json nor a .gguf file")
