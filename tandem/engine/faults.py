"""What can go wrong: with one item, typed as the contract has it, and with a model."""

from __future__ import annotations

from tandem.v1 import worker_pb2

MAX_MESSAGE_CHARACTERS = 200


class ModelError(Exception):
    """A model can't be loaded or can't be served by this engine; one line that says why."""

    def __init__(self, problem: str, variable: str = "") -> None:
        """`variable` names the setting at fault, where it isn't the model."""
        super().__init__(problem)
        self.variable = variable


class PieceNotFinite(ArithmeticError):
    """A piece of a prefill left keys and values that aren't numbers; the forward itself was run to its end."""


class ItemFault(Exception):
    """One item can't be served; `reason` is an ErrorReason, the message is for the operator and holds no tokens."""

    def __init__(self, reason: worker_pb2.ErrorReason.ValueType, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def to_proto(self, cache_epoch: int, cached_length: int) -> worker_pb2.ItemError:
        """The error as it crosses the wire, with the session's epoch and cache length."""
        message = str(self)[:MAX_MESSAGE_CHARACTERS]
        return worker_pb2.ItemError(
            reason=self.reason, message=message, cache_epoch=cache_epoch, cached_length=cached_length
        )


def invalid(field: str, problem: str) -> ItemFault:
    """The item breaks the contract in `field`."""
    return ItemFault(worker_pb2.ERROR_REASON_INVALID_ARGUMENT, f"{field}: {problem}")
