"""The Sampling of an item, from the message to the parameters of its session."""

from __future__ import annotations

from tandem.engine.faults import invalid
from tandem.engine.job import Job, WorkItem
from tandem.sampling import SamplingParams
from tandem.sampling_limits import leaves_a_token
from tandem.structured_output import Forms
from tandem.wire import IdArray


def params_of(item: WorkItem, forms: Forms | None) -> SamplingParams:
    """The item's sampling, checked; raises ItemFault INVALID_ARGUMENT."""
    try:
        return SamplingParams.from_proto(item.sampling, forms)
    except ValueError as error:
        raise invalid("sampling", str(error)) from error


def has_form(item: WorkItem) -> bool:
    """Whether `params_of` takes long: a form is to be compiled."""
    return item.HasField("sampling") and item.sampling.HasField("structured_output")


def check_sampling(item: WorkItem, vocabulary_size: int) -> None:
    """Raises ItemFault INVALID_ARGUMENT if a row may be left without a token, in a vocabulary that may be smaller than the one
    that the orchestrator has checked it against."""
    if item.HasField("sampling") and not leaves_a_token(item.sampling, vocabulary_size):
        raise invalid("sampling", f"leaves no token of the {vocabulary_size}")


def context(job: Job) -> IdArray | None:
    """All tokens of the job so far, its block included, if its parameters read them."""
    tokens = job.session.tokens
    return tokens.view(0, tokens.length) if job.sampling.reads_context else None
