"""Several processes with a part of one model each, as torchrun starts them: which of them this one is.

Rank 0 is the service. The others have no port and no sessions: they run what rank 0 runs, each on its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among those that share a model."""

    count: int = 1
    rank: int = 0
    local_rank: int = 0
    """Among those on this machine: the number of its GPU."""

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1


ALONE = Ranks()
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Is set in every process that torchrun starts."""


def ranks_from(environ: Mapping[str, str], wanted: int, variable: str) -> Ranks:
    """What torchrun says in the environment. Raises ConfigError that names the variable where that isn't `wanted` ranks."""
    if wanted == 1 and _TORCHRUN not in environ:
        return ALONE  # other launchers set WORLD_SIZE for purposes of their own
    started = _whole(environ, "WORLD_SIZE", 1)
    if started != wanted:
        raise ConfigError(
            f"{variable}: {wanted} means as many processes, which `torchrun --nproc-per-node` starts; here WORLD_SIZE "
            f"is {started}"
        )
    if wanted == 1:
        return ALONE
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ConfigError(f"{name}: missing; with WORLD_SIZE={started} `torchrun` sets it")
    rank = _whole(environ, "RANK", 0)
    if rank >= started:
        raise ConfigError(f"RANK: {rank} of {started} ranks, the first of which is 0")
    return Ranks(wanted, rank, _whole(environ, "LOCAL_RANK", rank))


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}: {text!r} is no whole number; `torchrun` sets it")
    return int(text)
