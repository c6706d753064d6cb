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


def ranks_from(environ: Mapping[str, str], wanted: int, variable: str) -> Ranks:
    """What torchrun says in the environment. Raises ConfigError that names the variable where that isn't `wanted` ranks."""
    started = int(environ.get("WORLD_SIZE", "1"))
    if started != wanted:
        raise ConfigError(
            f"{variable}: {wanted} means as many processes, which `torchrun --nproc-per-node` starts; here WORLD_SIZE "
            f"is {started}"
        )
    if wanted == 1:
        return ALONE
    rank = int(environ["RANK"])
    return Ranks(wanted, rank, int(environ.get("LOCAL_RANK", rank)))
