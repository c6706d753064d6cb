"""The one model there is, under the name that HTTP callers know it by."""

from __future__ import annotations

import time
from typing import Any

from ..runtime import Runtime
from .failures import HttpFailure


class ServedModel:
    """The target's model, or another name for it."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._since = int(time.time())
        self.token_text = runtime.vocabulary.token_text

    def name(self) -> str:
        """Empty while no target has said its name and none was set."""
        return self._name or self._runtime.target_model()

    def check(self, asked: str | None) -> None:
        """Raises HttpFailure for another model's name; none at all is this one."""
        name = self.name()
        if asked is not None and name and asked != name:
            raise HttpFailure(404, "the model does not exist; GET /v1/models names it", "model_not_found", "model")

    def describe(self) -> dict[str, Any]:
        """The model object. Raises RequestFailed while no target is connected."""
        limits = self._runtime.limits()
        return {
            "id": self.name(),
            "object": "model",
            "created": self._since,
            "owned_by": "tandem",
            "max_model_len": limits.context_length,
        }
