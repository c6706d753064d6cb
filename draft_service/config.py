"""Settings of the draft service."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tandem.config import ConfigError, address, choice, flag, share, whole_number
from tandem.engine.worker_settings import OFF, WorkerSettings

if TYPE_CHECKING:
    from tandem.engine.loading import ModelOptions

NGRAM = "ngram"
BOTH = "model+ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerSettings):
    """Proposes blocks of draft tokens."""

    role: ClassVar[str] = "draft"

    listen: str = address(
        "TANDEM_DRAFT_LISTEN", "127.0.0.1:50052", help="host:port to listen on; port 0 takes a free one"
    )
    method: str = choice(
        "TANDEM_DRAFT_METHOD",
        "model",
        ("model", NGRAM, BOTH),
        help="model; or ngram: what followed the last tokens when they stood in the request before; that needs the "
        "tokenizer and the config of TANDEM_DRAFT_MODEL, and no weights; or model+ngram: for each block the one that is "
        "expected to bring more",
    )
    layers: int = whole_number(
        "TANDEM_DRAFT_LAYERS",
        0,
        least=0,
        most=1024,
        help="run only so many of the model's first layers, with its own head: the target itself can draft so; 0: all",
    )
    support_size: int = whole_number(
        "TANDEM_DRAFT_SUPPORT_SIZE", 64, least=1, most=1024, help="most tokens that a draft distribution is cut to"
    )
    ahead_rows: int = whole_number(
        "TANDEM_DRAFT_AHEAD_ROWS",
        0,
        least=0,
        most=256,
        help="likely outcomes of a verification that are drafted for at a time while it runs; 0: none",
    )
    ahead_measured: bool = flag(
        "TANDEM_DRAFT_AHEAD_MEASURED",
        True,
        help="leave drafting ahead while rounds turn out longer with it, as where draft and target share processors",
    )

    stop_below: float = share(
        "TANDEM_DRAFT_STOP_BELOW",
        0.0,
        help="end a greedy or COUPLED request's block early once the chance that all of it stands, by the draft's own "
        "confidence, is below this; of a request with an adaptive gamma below what a token costs it, by the orchestrator's "
        "figures; 0: never",
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for what a draft without a model can't do."""
        if self.method != NGRAM:
            return
        asked = {
            "LAYERS": self.layers,
            "AHEAD_ROWS": self.ahead_rows,
            "STOP_BELOW": self.stop_below,
            "GGUF_FILE": self.gguf_file,
            "DEVICE": "" if self.device in ("auto", "cpu") else self.device,
            "DTYPE": "" if self.dtype == "auto" else self.dtype,
            "COMPILE": "" if self.compile == OFF else self.compile,
        }
        for name, value in asked.items():
            if value:
                raise ConfigError(f"TANDEM_DRAFT_{name}={value} needs a model: TANDEM_DRAFT_METHOD is {NGRAM}")

    def model_options(self) -> ModelOptions:
        """The part that says which model to load, and how."""
        options = WorkerSettings.model_options(self)
        return replace(options, layers=self.layers, extra_slots=self.ahead_rows)
