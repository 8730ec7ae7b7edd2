"""The ASGI application: FastAPI for routes and their OpenAPI page, and a short way past it for the hot ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bei.config.settings import ServeConfig
from bei.errors import BeiError, ShuttingDownError
from bei.metrics.registry import Metrics
from bei.metrics.request_timing import Timing
from bei.server.auth.keys import Keyring
from bei.server.dialects import cohere, nim, tei, vllm, vllm_pooling
from bei.server.dialects.base import Dialects, mounted
from bei.server.dialects.table import all_dialects
from bei.server.endpoint.context import Context
from bei.server.endpoint.models import Models, models_router
from bei.server.endpoint.response_memory import AnswerMemory
from bei.server.endpoint.route import Endpoint, Route
from bei.server.guard import Guard, monitors_paths, open_paths
from bei.server.http.cors import Cors
from bei.server.http.errors import FORM_KEY, HANDLERS, UNEXPECTED, error_response
from bei.server.http.fast_response import exchange_of
from bei.server.http.request_id import HEADER as REQUEST_ID
from bei.server.http.request_id import request_id_of
from bei.server.http.responses import WholeResponse
from bei.server.http.root_path import with_root, without_root
from bei.server.http.shared_limits import ALONE, Tally
from bei.server.openapi.document import OpenAPI
from bei.server.routes import classify, embed, openai_embeddings, predict_tokens, rerank, tokenize, zero_shot
from bei.server.routes.certificate import certificate_router
from bei.server.routes.health import health_router
from bei.server.routes.info import info_router
from bei.server.routes.pages import pages_router
from bei.server.scope import SCOPE_REQUEST_ID, SCOPE_WORK
from bei.server.status.peers import Peers
from bei.server.status.stats import PATH as STATS
from bei.server.status.whole_server import WholeServer
from bei.server.telemetry.access_log import Record, RequestLog
from bei.server.telemetry.request_record import Work
from bei.server.telemetry.server_timing import HEADER as SERVER_TIMING
from bei.server.telemetry.server_timing import server_timing
from bei.version import __version__

if TYPE_CHECKING:
    from bei.server.telemetry.spans import Tracing

log = logging.getLogger(__name__)

Answer = Callable[[Request], Awaitable[Response]]


def inference_routes(config: ServeConfig) -> tuple[Route[Any], ...]:
    """All routes that ask a model."""
    max_inputs = config.max_client_batch_size
    openai = openai_embeddings.route(max_inputs, accepts_ids=config.openai_token_ids == "accept")
    return (
        openai,
        replace(openai, path="/embeddings"),
        *cohere.EMBED_ROUTES,
        nim.RANKING,
        vllm.SCORE,
        vllm_pooling.ROUTE,
        vllm.DETOKENIZE,
        *tei.root_routes(),
        tei.decode_route(max_inputs),
        *tei.with_timing((*embed.routes(max_inputs), *rerank.routes(max_inputs), *classify.ROUTES)),
        zero_shot.ROUTE,
        predict_tokens.ROUTE,
        tokenize.ROUTE,
    )


def create_app(
    models: Models,
    config: ServeConfig,
    metrics: Metrics,
    keys: Keyring | None = None,
    request_log: RequestLog | None = None,
    tracing: Tracing | None = None,
    *,
    answer_bytes: Tally = ALONE,
    peers: Peers | None = None,
) -> ASGIApp:
    """The application over ``models``, for whom ``keys`` know. It holds no state of its own.

    Of a front end: ``answer_bytes`` are those of all front ends, ``peers`` the other processes; made on the event loop.
    """
    openapi = OpenAPI()
    app = FastAPI(
        title="bei",
        version=__version__,
        description="Embedding inference server. Every answer has the request's x-request-id, or a new one.",
        docs_url=None,  # bei.server.pages has its own, which loads nothing from elsewhere
        redoc_url=None,
        exception_handlers=HANDLERS,  # type: ignore[arg-type]
        generate_unique_id_function=openapi.operation_id,
    )
    context = Context(
        models,
        config.max_client_batch_size,
        config.answer_limit,
        AnswerMemory(config.answer_memory, answer_bytes),
        compresses=config.compress_answers,
    )
    server = WholeServer(models, metrics, peers)
    dialects = Dialects(all_dialects(models, config, server), config.dialect)
    routes = [*inference_routes(config)]
    endpoints = [Endpoint(route, context, config.payload_limit) for route in routes]
    for dialect in dialects:
        under = [*mounted(dialect)]
        routes += under
        endpoints += [Endpoint(route, context, config.payload_limit, any_model=dialect.any_model) for route in under]
        if dialect.reads is not None:
            for root in dialect.roots:
                app.include_router(dialect.reads, prefix=f"/{dialect.name}{root}")
    metrics.model_routes = frozenset(route.path for route in routes if route.runs_engine)
    for endpoint in endpoints:
        endpoint.add_to(app)
    app.include_router(models_router(models))
    app.include_router(info_router(models, config))
    app.include_router(tei.openapi_router())
    app.include_router(health_router(server))
    app.include_router(certificate_router(models))
    app.include_router(pages_router(config))
    # Made when it is first asked for: a server that starts does not wait for it.
    app.openapi = cache(partial(openapi.page, app, routes, [*dialects], config))  # type: ignore[method-assign]
    guard = None if keys is None else Guard(keys, open_paths(config, dialects))
    # Not a middleware of FastAPI's: two more layers would stand in front of it.
    return _Front(app, metrics, endpoints, dialects, config, guard, request_log, tracing)


class _Front:
    """Counts and times every request, lets it in, and answers the hot routes itself.

    Plain ASGI. FastAPI's routing, dependency solving and exit stacks cost more than validating and rendering a short
    text does (docs/decisions.md, "The hot route"); the hot routes need none of it.
    """

    def __init__(
        self,
        app: FastAPI,
        metrics: Metrics,
        endpoints: Seq[Endpoint],
        dialects: Dialects,
        config: ServeConfig,
        guard: Guard | None,
        request_log: RequestLog | None,
        tracing: Tracing | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._hot = {endpoint.path: endpoint for endpoint in endpoints}
        self._dialects = dialects
        self._guard = guard
        self._log = request_log
        self._tracing = tracing
        self._untraced = frozenset((STATS,)).union(*monitors_paths(dialects))
        self._server_timing = config.server_timing
        self._is_timed = config.server_timing or request_log is not None or tracing is not None
        self._root = config.root_path
        self._cors = Cors(config.cors_origins, credentials=config.cors_credentials) if config.cors_origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = 500  # stays so if nothing is sent
        request_id = request_id_of(scope["headers"])
        scope[SCOPE_REQUEST_ID] = request_id.decode()
        headers = [(REQUEST_ID, request_id)]  # of every answer
        if self._cors is not None:
            headers += self._cors.headers(scope["headers"])
        work = Work()
        if self._log is not None:
            work, receive, send = self._log.begin(receive, send)
        if self._is_timed:
            work.timing = Timing(begun_s)
        scope[SCOPE_WORK] = work

        def answers(with_status: int) -> list[tuple[bytes, bytes]]:
            """Called once, when the answer begins. Notes its status and returns the headers that every answer gets
            here: request id, CORS, Server-Timing."""
            nonlocal status
            status = with_status
            if work.timing is not None:
                work.timing.answers()
                if self._server_timing:
                    headers.append((SERVER_TIMING, server_timing(work.timing)))
            return headers

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *answers(message["status"])]
            await send(message)

        endpoint: Endpoint | None = None
        is_traced = self._tracing is not None
        try:
            scope = self._placed(without_root(scope, self._root))
            is_traced = is_traced and not (scope["path"] in self._untraced and scope["method"] in ("GET", "HEAD"))
            endpoint = self._hot.get(scope["path"]) if scope["method"] == "POST" else None
            preflight = self._let_in(scope)
            if preflight is not None:
                await preflight(scope, receive, counting_send)
            elif endpoint is None:
                scope = with_root(scope, self._root)
                await self._app(scope, receive, counting_send)
            else:
                response = await _answer(endpoint.answer, scope, receive)
                exchange = exchange_of(send)
                if exchange is not None and exchange.can_answer and isinstance(response, WholeResponse):
                    response.raw_headers += answers(response.status_code)
                    exchange.answer(response)
                else:
                    await response(scope, receive, counting_send)
        except BeiError as error:  # no such dialect, or no key
            await error_response(error, scope)(scope, receive, counting_send)
        except ClientDisconnect:  # in the middle of its answer
            status = 499
        except BaseException:  # in the middle of its answer: the server closes the connection, and logs the error
            status = 500
            raise
        finally:
            route = endpoint.path if endpoint else getattr(scope.get("route"), "path", "unmatched")
            seconds = time.monotonic() - begun_s
            self._metrics.request(route, status, seconds, work.model, work.lane, work.num_inputs)
            if self._guard is not None:
                self._guard.count(scope, status)
            if self._log is not None:
                assert isinstance(work, Record)  # of the log
                self._log.end(work, scope, route, status, seconds)
            if self._tracing is not None and is_traced:
                self._tracing.end(work, scope, route, status, seconds)

    def _let_in(self, scope: Scope) -> Response | None:
        """What a browser is told that asks before it sends. None: the request may come in. Raises what Guard does."""
        preflight = None if self._cors is None else self._cors.preflight(scope)
        if preflight is None and self._guard is not None:
            self._guard.check(scope)
        return preflight

    def _placed(self, scope: Scope) -> Scope:
        """``scope`` where its dialect has its route, with its form of errors; as it is where it has none.

        Raises what ``Dialects.of`` does.
        """
        dialect, path = self._dialects.of(scope)
        if dialect is None:
            return scope
        if path == scope["path"]:
            return {**scope, FORM_KEY: dialect.error_form}
        placed = {**scope, "path": path, "raw_path": path.encode(), FORM_KEY: dialect.error_form}
        is_there = path in self._hot or any(route.matches(placed)[0] is Match.FULL for route in self._app.router.routes)
        return placed if is_there else scope


async def _answer(endpoint: Answer, scope: Scope, receive: Receive) -> Response:
    """What ``endpoint`` answers, or the answer that says why it does not."""
    try:
        return await endpoint(Request(scope, receive))
    except BeiError as error:
        return error_response(error, scope)
    except ClientDisconnect:
        return Response(status_code=499)  # for the count: nobody is left to read it
    except asyncio.CancelledError:  # a stopping server has waited long enough for the rest of the request
        message = "The server has stopped: send the request to another replica."
        return error_response(ShuttingDownError(message), scope)
    except Exception:  # a border: a bug costs its own request the answer, and the client sees no traceback
        log.exception("unexpected error, request %s on %s", scope[SCOPE_REQUEST_ID], scope["path"])
        return error_response(UNEXPECTED, scope)
