"""Configuration of a service: one frozen dataclass, read once from flags and `TANDEM_*` variables, and validated.

A field is declared with `setting`, or with one of the functions for common kinds of it; its flag is its name, its
variable is named in full, or with `{role}` where services share a declaration: each has its own `role`. A flag wins over
the variable, the variable over the default. Every error names the variable, since that is what an operator can change.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")


class ConfigError(ValueError):
    """A setting is missing or out of range; the message names its variable."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    variable: str
    help: str
    parse: Callable[[str], Any]
    check: Callable[[Any], bool]
    expected: str


_REQUIRED = object()


def setting(
    variable: str,
    default: Any = _REQUIRED,
    *,
    help: str,
    parse: Callable[[str], Any] = str,
    check: Callable[[Any], bool] = lambda _: True,
    expected: str = "",
) -> Any:
    """A dataclass field read from `variable`; `check` holds for a good value and `expected` says in words which are."""
    metadata = {"setting": _Setting(variable, help, parse, check, expected)}
    if default is _REQUIRED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def whole_number(variable: str, default: int, *, help: str, least: int, most: float = math.inf) -> Any:
    """A number of something, from `least` to `most`."""
    return setting(
        variable,
        default,
        help=help,
        parse=int,
        check=lambda value: least <= value <= most,
        expected=f"at least {least}" if most == math.inf else f"{least} to {most}",
    )


def seconds(variable: str, default: float, *, help: str, most: float = math.inf, above: float | None = None) -> Any:
    """A time, and never an infinite one: not negative, at most `most`, or more than `above`."""
    least = "at least 0, and finite" if above is None else f"more than {above:g}, and finite"
    return setting(
        variable,
        default,
        help=help,
        parse=float,
        check=lambda value: math.isfinite(value) and (value >= 0 if above is None else value > above) and value <= most,
        expected=least if most == math.inf else f"0 to {most:g}",
    )


def share(variable: str, default: float, *, help: str) -> Any:
    """A part of something, from 0 to 1."""
    return setting(
        variable, default, help=help, parse=float, check=lambda value: 0.0 <= value <= 1.0, expected="0 to 1"
    )


def flag(variable: str, default: bool, *, help: str) -> Any:
    """On or off."""
    return setting(variable, default, help=help, parse=parse_bool, expected="true or false")


def choice(variable: str, default: str, options: Sequence[str], *, help: str, parse: Callable[[str], str] = str) -> Any:
    """One of a few words."""
    expected = "one of " + ", ".join(options)
    return setting(variable, default, help=help, parse=parse, check=tuple(options).__contains__, expected=expected)


def address(variable: str, default: str, *, help: str) -> Any:
    """host:port; where the default is empty, nothing will do too."""
    return setting(
        variable,
        default,
        help=help,
        check=lambda value: is_address(value) or value == default == "",
        expected="host:port",
    )


def parse_bool(text: str) -> bool:
    """true/false in the spellings people use; raises ValueError for others."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(text)


def parse_list(text: str) -> tuple[str, ...]:
    """Comma-separated values, blanks dropped."""
    return tuple(part for part in (piece.strip() for piece in text.split(",")) if part)


def is_address(text: str) -> bool:
    """Whether the text is host:port, with a port that can be."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65536


def settings_of(config_class: type[Any]) -> dict[str, _Setting]:
    """Field name to its declaration, its own before those that it shares: also for documentation, and for checks of
    manifests against the code."""
    own = config_class.__annotations__
    fields = sorted(dataclasses.fields(config_class), key=lambda field: field.name not in own)
    role = getattr(config_class, "role", "")
    return {field.name: _of_role(field.metadata["setting"], role) for field in fields}


def _of_role(declared: _Setting, role: str) -> _Setting:
    return dataclasses.replace(declared, variable=declared.variable.format(role=role.upper()))


def load(config_class: type[ConfigT], arguments: Sequence[str], environment: Mapping[str, str]) -> ConfigT:
    """Reads a config; raises ConfigError for a bad value, SystemExit for an unknown flag or --help."""
    settings = settings_of(config_class)
    parser = argparse.ArgumentParser(description=config_class.__doc__, allow_abbrev=False)
    for name, declared in settings.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            help=f"{declared.help} [{declared.variable}]".replace("%", "%%"),
            metavar="VALUE",
        )
    flags = vars(parser.parse_args(arguments))
    values = {}
    for name, declared in settings.items():
        raw = flags[name] if flags[name] is not None else environment.get(declared.variable)
        if raw is not None:
            values[name] = _parsed(declared, raw)
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        if field.name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"{settings[field.name].variable} is not set: {settings[field.name].help}")
    return config_class(**values)


def _parsed(declared: _Setting, raw: str) -> Any:
    expected = declared.expected or declared.help
    try:
        value = declared.parse(raw)
    except ValueError as error:
        raise ConfigError(f"{declared.variable}={raw!r} can't be read: expected {expected}") from error
    if not declared.check(value):
        raise ConfigError(f"{declared.variable}={raw!r} is out of range: expected {expected}")
    return value
