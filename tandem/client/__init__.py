"""Clients of the public API, one that waits and one for asyncio: plain dataclasses in, plain dataclasses out, typed errors.

They hide the generated stubs and nothing else.
"""

from .asynchronous import AsyncGeneration, AsyncTandemClient
from .blocking import Generation, TandemClient
from .errors import (
    AlreadyExistsError,
    CancelledCallError,
    DeadEndError,
    DeadlineError,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    TakenOverError,
    TandemError,
    UnauthenticatedError,
    UnavailableError,
)
from .messages import build_request
from .values import (
    Chunk,
    FinishReason,
    GeneratedToken,
    GenerationFinish,
    GenerationOptions,
    GenerationStart,
    LogprobsMode,
    Message,
    Method,
    Prompt,
    Speculation,
    StructuredOutput,
    TokenKind,
    Usage,
)

__all__ = [
    "AlreadyExistsError",
    "AsyncGeneration",
    "AsyncTandemClient",
    "CancelledCallError",
    "Chunk",
    "DeadEndError",
    "DeadlineError",
    "FieldViolation",
    "FinishReason",
    "GeneratedToken",
    "Generation",
    "GenerationFinish",
    "GenerationOptions",
    "GenerationStart",
    "InvalidRequestError",
    "LogprobsMode",
    "Message",
    "Method",
    "NotFoundError",
    "OverloadedError",
    "Prompt",
    "ProtocolError",
    "Speculation",
    "StructuredOutput",
    "TakenOverError",
    "TandemClient",
    "TandemError",
    "TokenKind",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "build_request",
]
