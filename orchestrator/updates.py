"""UpdateSampling: a call becomes a change of what the store holds of a request. Its owner learns of it by its next commit."""

from __future__ import annotations

import logging

from tandem.v1 import orchestrator_pb2 as api

from .call import GrpcCall
from .errors import InvalidArgument, RequestFailed
from .metrics import Metrics
from .runtime import Runtime
from .sampling_update import SamplingUpdate

log = logging.getLogger(__name__)

CHANGE_TOKENS = 2
"""What a change costs its caller. It drops up to two rounds, each of which would have brought a token at least."""


class SamplingUpdates:
    """Serves the calls of one orchestrator."""

    def __init__(self, runtime: Runtime, metrics: Metrics) -> None:
        self._runtime = runtime
        self._metrics = metrics

    async def run(self, request: api.UpdateSamplingRequest, call: GrpcCall) -> api.UpdateSamplingResponse:
        """Raises RequestFailed."""
        status = "UNKNOWN"
        try:
            response = await self._update(request, call)
            status = "OK"
        except RequestFailed as failure:
            status = failure.code.name
            raise
        finally:
            self._metrics.sampling_updated(status)
        return response

    async def _update(self, request: api.UpdateSamplingRequest, call: GrpcCall) -> api.UpdateSamplingResponse:
        runtime = self._runtime
        caller = runtime.callers.identify(call.metadata())
        runtime.callers.check_budget(caller)
        if not request.request_id:
            raise InvalidArgument("request_id", "must be set to update a request")
        update = SamplingUpdate(request, runtime.vocabulary, runtime.limits())
        name = caller.name or call.certificate_name()
        # Ahead of it, so that who leaves meanwhile has paid; given back where nothing was changed.
        runtime.callers.spend(caller, CHANGE_TOKENS)
        try:
            response, took_effect = await runtime.sessions.update(request.request_id, name, update.change)
        except RequestFailed:
            runtime.callers.spend(caller, -CHANGE_TOKENS)
            raise
        if not took_effect:
            runtime.callers.spend(caller, -CHANGE_TOKENS)
        log.info(
            "sampling updated",
            extra={
                "request_id": request.request_id,
                "config_version": response.config_version,
                "committed_tokens": response.completion_tokens,
            },
        )
        return response
