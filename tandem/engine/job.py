"""One item while it is being worked on, and the contract between the engine and what is computed with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tandem.engine.session import Session
from tandem.engine.work import Work
from tandem.v1 import sampling_pb2, worker_pb2

if TYPE_CHECKING:
    import torch

    from tandem.engine.feed import Feed
    from tandem.engine.stream import Stream
    from tandem.sampling import SamplingParams


class WorkItem(Protocol):
    """What ProposeItem and VerifyItem have in common."""

    @property
    def request_id(self) -> str: ...
    @property
    def cache_epoch(self) -> int: ...
    @property
    def prefix(self) -> worker_pb2.PrefixUpdate: ...
    @property
    def sampling(self) -> sampling_pb2.Sampling: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def traceparent(self) -> str: ...
    def HasField(self, field_name: Any) -> bool: ...  # noqa: N802


class Job:
    """An admitted item: its session's tokens beyond `cached_length` are to be run, then `rows` of logits are wanted."""

    __slots__ = ("block", "cache_epoch", "result", "rows", "sampling", "session", "stream", "work")

    sampling: SamplingParams
    session: Session
    stream: Stream

    def __init__(self, cache_epoch: int, block: int, rows: int) -> None:
        self.cache_epoch = cache_epoch
        self.block = block
        """gamma, without the look-ahead."""
        self.rows = rows
        self.result: Any = None
        """Set by the method when the job is done."""
        self.work = Work()

    @property
    def pending(self) -> int:
        """Tokens still to be run before there are logits."""
        return self.session.tokens.length - self.session.cached_length

    @property
    def held(self) -> int:
        """Tokens that the next update may build on, for the answer."""
        return self.session.cached_length

    @property
    def unread(self) -> int:
        """Tokens of them that are still to be run, for the answer."""
        return 0


ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
JobT = TypeVar("JobT", bound=Job)


class RaggedModel(Protocol):
    """What runs the tokens. A CausalLM; or, for a drafter without a model, anything that keeps count."""

    @property
    def slots(self) -> int:
        """Sessions it has room for."""

    @property
    def max_length(self) -> int:
        """Most tokens of a session."""

    @property
    def padded_vocabulary_size(self) -> int:
        """Ids below this can be run."""

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Runs feeds of different sessions; the wanted logits, float32 [sum of rows, padded vocabulary]."""

    def copy_tokens(self, source: int, target: int, start: int, end: int) -> None:
        """Lets slot `target` hold what slot `source` holds for the tokens start to end."""

    def clear_slot(self, slot: int) -> None:
        """Leaves nothing of what was computed in the slot, which may not be finite."""

    def synchronize(self) -> None:
        """Returns once all forwards are done; raises what went wrong in them."""

    def self_test(self) -> None:
        """Raises if nothing can be run any more."""


class Method(Protocol[ItemT_contra, JobT]):
    """What is done with logits: verification or drafting. Called by the step thread only."""

    def admit(self, item: ItemT_contra) -> JobT:
        """Checks the item's own fields; raises ItemFault."""

    def begin(self, job: JobT) -> None:
        """The prefix is in the session; appends what is to be run with it, or sets the result where nothing needs be."""

    def consume(self, jobs: Sequence[JobT], logits: torch.Tensor) -> None:
        """Uses the logits, float32 [sum of the jobs' rows, padded vocabulary]. A job that is done has its `result`
        set; any other has appended tokens to run. Where it raises, no job was changed."""

    def check(self, job: JobT) -> None:
        """Invariants of a job that is done, and of its result; raises where one doesn't hold. For debugging: dear."""
