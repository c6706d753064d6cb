"""The routes of the HTTP face, and the errors of those who miss them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..callers import Callers
from ..errors import RequestFailed
from ..generation import Generations
from ..recorder import Recorders
from . import page
from .body import BodyRoom
from .failures import HttpFailure, http_failure, internal_failure
from .generation_endpoint import GenerationEndpoint
from .served_model import ServedModel


def build_app(
    generations: Generations,
    recorders: Recorders,
    callers: Callers,
    model: ServedModel,
    registry: CollectorRegistry | None,
    ready: Callable[[], bool],
) -> Starlette:
    """The application; `ready` says what gRPC health says. All but that and the page is for known callers, where there are such.

    Without a registry there is no /metrics.
    """

    async def models(request: Request) -> Response:
        callers.identify(request.headers.items())
        return JSONResponse({"object": "list", "data": [model.describe()]})

    async def one_model(request: Request) -> Response:
        callers.identify(request.headers.items())
        model.check(request.path_params["name"])
        return JSONResponse(model.describe())

    async def health(_: Request) -> Response:
        serving = ready()
        return JSONResponse({"status": "ready" if serving else "not ready"}, 200 if serving else 503)

    shown = page.load()

    async def show(_: Request) -> Response:
        return shown

    room = BodyRoom()
    completion = GenerationEndpoint("completion", generations, recorders, callers, model, room)
    chat = GenerationEndpoint("chat", generations, recorders, callers, model, room)
    return Starlette(
        routes=[
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/", show),
            Route("/healthz", health),
            *([_metrics(registry, callers)] if registry is not None else []),
        ],
        exception_handlers={
            HttpFailure: _tell,
            RequestFailed: _tell_failed,
            HTTPException: _tell_missed,
            Exception: _tell_internal,
        },
    )


def _metrics(registry: CollectorRegistry, callers: Callers) -> Route:
    async def metrics(request: Request) -> Response:
        callers.identify(request.headers.items())
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", metrics)


async def _tell(_: Request, failure: Exception) -> Response:
    assert isinstance(failure, HttpFailure)
    return JSONResponse(failure.body(), failure.status, failure.headers())


async def _tell_failed(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, RequestFailed)
    return await _tell(request, http_failure(failure))


async def _tell_missed(request: Request, error: Exception) -> Response:
    """No such path, or no such method at this path."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    response = await _tell(request, HttpFailure(error.status_code, error.detail, code))
    response.headers.update(error.headers or {})
    return response


async def _tell_internal(request: Request, _: Exception) -> Response:
    return await _tell(request, internal_failure())
