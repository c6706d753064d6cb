"""The settings that a stack was started with, as they are kept on record, and how two stacks differ in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.cli.settings import EXTERNAL_VARIABLES, StackSettings, listen_variable, model_variable
from tandem.cli.state import StackState
from tandem.cli.variables import of_services

SETTING = "setting "
"""Begins the names of those that aren't there unless they were asked for."""


def choices(settings: StackSettings) -> dict[str, str]:
    """The settings that a running stack must share with a new command, or that command would silently use others."""
    tls = settings.encryption.on_record()
    grouped = {
        *tls,
        *map(listen_variable, settings.listen),
        *map(model_variable, settings.models),
        *EXTERNAL_VARIABLES.values(),
    }
    groups: dict[str, Mapping[str, object]] = {
        "model ": settings.models,
        "listen ": settings.listen,
        "tls ": tls,
        "external ": {name: mask_password(",".join(urls)) for name, urls in settings.external.items()},
        SETTING: {name: value for name, value in of_services(settings.environment).items() if name not in grouped},
    }
    return {f"{group}{name}": str(value) for group, values in groups.items() for name, value in values.items()}


def differing(before: Mapping[str, str], now: Mapping[str, str], *, all_of_them: bool = True) -> list[str]:
    """The choices in which two stacks differ, in words; unless `all_of_them`, whoever names no setting takes any."""
    return [
        f"{name}: {before.get(name, 'none')} runs, {now.get(name, 'none')} was asked for"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and (all_of_them or name in now or not name.startswith(SETTING))
    ]


def settings_on_record(state: StackState) -> dict[str, str]:
    """What was set beside models and addresses, by variable."""
    return {name.removeprefix(SETTING): value for name, value in state.choices.items() if name.startswith(SETTING)}


def recorded_files(state: StackState) -> dict[str, str]:
    """Of a running stack: the files that its services are reached with, by variable."""
    group = "tls "
    return {name.removeprefix(group): path for name, path in state.choices.items() if name.startswith(group)}


def mask_password(url: str) -> str:
    """A URL without the password in it, fit for a screen and a file."""
    # The client library takes one behind the ? as well.
    url = re.sub(r"([?&][^=&]*password=)[^&]*", r"\1***", url, flags=re.IGNORECASE)
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not separator or not at:
        return url
    user = credentials.partition(":")[0]
    return f"{scheme}://{user}:***@{host}"
