"""Settings of the target service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tandem.config import ConfigError, address, flag, seconds, whole_number
from tandem.engine.worker_settings import OFF, WorkerSettings

TENSOR_PARALLEL = "TANDEM_TARGET_TENSOR_PARALLEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(WorkerSettings):
    """Scores blocks of draft tokens."""

    role: ClassVar[str] = "target"
    verifies: ClassVar[bool] = True

    listen: str = address(
        "TANDEM_TARGET_LISTEN", "127.0.0.1:50053", help="host:port to listen on; port 0 takes a free one"
    )
    max_waiting: int = whole_number(
        "TANDEM_TARGET_MAX_WAITING",
        256,
        least=0,
        most=65536,
        help="requests that may wait for a cache slot, in turns by orchestrator; more are refused",
    )
    max_waiting_seconds: float = seconds(
        "TANDEM_TARGET_MAX_WAITING_SECONDS", 30.0, most=3600, help="longest wait for a cache slot"
    )
    tensor_parallel: int = whole_number(
        TENSOR_PARALLEL,
        1,
        least=1,
        most=64,
        help="processes that share the model, as many as torchrun starts; more than one for a model larger than a GPU",
    )
    gather: bool = flag(
        "TANDEM_TARGET_GATHER",
        True,
        help="let a step wait a moment for requests that are about to come back, where that pays",
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for what a model in parts can't do."""
        if self.tensor_parallel > 1 and self.compile != OFF:
            raise ConfigError(
                f"TANDEM_TARGET_COMPILE={self.compile} is for a model in one process: {TENSOR_PARALLEL} is "
                f"{self.tensor_parallel}"
            )
