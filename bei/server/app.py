"""The ASGI application: FastAPI for routes and their OpenAPI page, and a short way past it for the hot ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bei import __version__
from bei.config import ServeConfig
from bei.errors import BeiError, ShuttingDownError
from bei.metrics import Metrics
from bei.server import classify, embed, embeddings, rerank, tokenize, tokens
from bei.server.answers import AnswerMemory
from bei.server.endpoint import Context, Endpoint, Route
from bei.server.errors import HANDLERS, UNEXPECTED, error_response
from bei.server.health import health_router
from bei.server.info import info_router
from bei.server.models import Models, models_router

log = logging.getLogger(__name__)

Answer = Callable[[Request], Awaitable[Response]]


def inference_routes(config: ServeConfig) -> tuple[Route[Any], ...]:
    """All routes that ask a model."""
    max_inputs = config.max_client_batch_size
    return (
        embeddings.route(max_inputs, accepts_ids=config.openai_token_ids == "accept"),
        *embed.routes(max_inputs),
        *rerank.ROUTES,
        *classify.ROUTES,
        tokens.ROUTE,
        tokenize.ROUTE,
    )


def create_app(models: Models, config: ServeConfig, metrics: Metrics) -> ASGIApp:
    """The application over ``models``. It holds no state of its own."""
    app = FastAPI(
        title="bei",
        version=__version__,
        description="Embedding inference server.",
        exception_handlers=HANDLERS,  # type: ignore[arg-type]
    )
    context = Context(models, config.max_client_batch_size, config.answer_limit, AnswerMemory(config.answer_memory))
    endpoints = [Endpoint(route, context, config.payload_limit) for route in inference_routes(config)]
    for endpoint in endpoints:
        endpoint.add_to(app)
    app.include_router(models_router(models))
    app.include_router(info_router(models, config))
    app.include_router(health_router(models, metrics))
    hot = {("POST", endpoint.path): endpoint.answer for endpoint in endpoints}
    return _Front(app, metrics, hot)  # not a middleware of FastAPI's: two more layers would stand in front of it


class _Front:
    """Counts and times every request, and answers the hot routes itself.

    Plain ASGI. FastAPI's routing, dependency solving and exit stacks cost more than validating and rendering a short
    text does (docs/decisions.md, "The hot route"); the hot routes need none of it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, hot: Mapping[tuple[str, str], Answer]) -> None:
        self._app = app
        self._metrics = metrics
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500  # stays so if nothing is sent

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        endpoint = self._hot.get((scope["method"], scope["path"]))
        try:
            if endpoint is None:
                await self._app(scope, receive, counting_send)
            else:
                await _answer(endpoint, scope, receive, counting_send)
        except ClientDisconnect:  # in the middle of its answer
            status = 499
        except BaseException:  # in the middle of its answer: the server closes the connection, and logs the error
            status = 500
            raise
        finally:
            route = scope["path"] if endpoint else getattr(scope.get("route"), "path", "unmatched")
            self._metrics.request(route, status, time.perf_counter() - started)


async def _answer(endpoint: Answer, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        response = await endpoint(Request(scope, receive))
    except BeiError as error:
        response = error_response(error)
    except ClientDisconnect:
        response = Response(status_code=499)  # for the count: nobody is left to read it
    except asyncio.CancelledError:  # a stopping server has waited long enough for the rest of the request
        response = error_response(ShuttingDownError("The server has stopped: send the request to another replica."))
    except Exception:  # a border: a bug costs its own request the answer, and the client sees no traceback
        log.exception("unexpected error on %s", scope["path"])
        response = error_response(UNEXPECTED)
    await response(scope, receive, send)
