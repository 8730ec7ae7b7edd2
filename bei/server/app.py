"""The ASGI application: Starlette's routes, a short way past them for the hot ones, and the middlewares before both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache, partial
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from bei.config.settings import ServeConfig
from bei.errors import BeiError
from bei.server.auth.middleware import ApiKeys
from bei.server.batches.batches_routes import batches_router
from bei.server.batches.files_routes import files_router
from bei.server.dialects import cohere, nim, tei, vllm, vllm_pooling
from bei.server.dialects.base import Dialect, Dialects, mounted
from bei.server.dialects.table import all_dialects
from bei.server.endpoint.context import Context
from bei.server.endpoint.models import Models, models_router
from bei.server.endpoint.route import Endpoint, Route
from bei.server.http.cors import Cors, CorsHeaders, CorsPreflight
from bei.server.http.errors import FORM_KEY, HANDLERS, UNEXPECTED, ErrorResponses, error_response, stopped
from bei.server.http.fast_response import exchange_of
from bei.server.http.memory_budgets import AnswerMemory
from bei.server.http.request_id import RequestIds
from bei.server.http.responses import WholeResponse
from bei.server.http.root_path import RootPathRemoved, RootPathRestored, without_root
from bei.server.http.routing import ApiRouter
from bei.server.open_paths import open_paths, untraced_paths
from bei.server.openapi.document import page
from bei.server.routes import (
    classify,
    decisions,
    embed,
    extract,
    openai_embeddings,
    predict_tokens,
    rerank,
    sie_extract,
    systemone,
    tokenize,
    zero_shot,
)
from bei.server.routes.azure import azure_models_router, azure_routes
from bei.server.routes.certificate import certificate_router
from bei.server.routes.chat_embeddings import with_chats
from bei.server.routes.health import health_router
from bei.server.routes.hub_paths import hub_routes
from bei.server.routes.info import info_router
from bei.server.routes.pages import pages_router
from bei.server.scope import SCOPE_ASKED_PATH, SCOPE_ENDPOINT, SCOPE_RECORD, SCOPE_REQUEST_ID
from bei.server.server_parts import ServerParts
from bei.server.status.peers import Peers
from bei.server.status.whole_server import WholeServer
from bei.server.telemetry.middleware import with_answer_headers

log = logging.getLogger(__name__)

Answer = Callable[[Request], Awaitable[Response]]


def inference_routes(config: ServeConfig) -> tuple[Route[Any], ...]:
    """All routes that ask a model."""
    max_inputs = config.max_client_batch_size
    accepts_ids = config.openai_token_ids == "accept"
    openai = with_chats(openai_embeddings.route(max_inputs, accepts_ids=accepts_ids, echoes_tier=True))
    return (
        openai,
        openai_embeddings.infinity_route(max_inputs, accepts_ids=accepts_ids),
        *cohere.EMBED_ROUTES,
        nim.RANKING,
        vllm.SCORE,
        replace(vllm.SCORE, path="/v1/score"),
        vllm_pooling.ROUTE,
        vllm.DETOKENIZE,
        *azure_routes(max_inputs, accepts_ids=accepts_ids),
        *tei.root_routes(),
        *hub_routes(next(iter(tei.root_routes()))),
        tei.decode_route(max_inputs),
        *tei.with_timing((*embed.routes(max_inputs), *rerank.routes(max_inputs), *classify.ROUTES)),
        zero_shot.ROUTE,
        predict_tokens.ROUTE,
        extract.ROUTE,
        sie_extract.ROUTE,
        decisions.ROUTE,
        systemone.ROUTE,
        tokenize.ROUTE,
    )


def create_app(
    models: Models, parts: ServerParts, *, answers: AnswerMemory | None = None, peers: Peers | None = None
) -> ASGIApp:
    """The application over ``models``. It holds no state of its own.

    In a front-end process ``answers`` counts those of all front ends, and ``peers`` are the other processes; they are
    made on the event loop.
    """
    config, metrics, router = parts.config, parts.metrics, ApiRouter()
    context = Context(
        models,
        config.max_client_batch_size,
        config.answer_limit,
        AnswerMemory(config.answer_memory) if answers is None else answers,
        compresses=config.compress_answers,
    )
    server = WholeServer(models, metrics, peers)
    dialects = Dialects(all_dialects(models, config, server), config.dialect)
    routes = [*inference_routes(config)]
    any_name = config.any_model_name
    endpoints = [Endpoint(route, context, config.payload_limit, any_model=any_name) for route in routes]
    for dialect in dialects:
        under = [*mounted(dialect)]
        routes += under
        answers_any = dialect.any_model or any_name
        endpoints += [Endpoint(route, context, config.payload_limit, any_model=answers_any) for route in under]
        if dialect.reads is not None:
            for root in dialect.roots:
                router.include(dialect.reads, f"/{dialect.name}{root}")
    metrics.model_routes = frozenset(route.path for route in routes if route.runs_engine)
    inference = [endpoint.framework_route() for endpoint in endpoints]
    router.routes += inference
    router.include(models_router(models))
    router.include(azure_models_router(models))
    router.include(cohere.key_router())
    router.include(info_router(models, config))
    router.include(tei.openapi_router())
    router.include(health_router(server, page=_page_of(config)))
    router.include(certificate_router(models))
    router.include(files_router(parts.batches, config.batch_file_limit))
    router.include(pages_router(config))
    paths = RoutePaths(dialects, endpoints, router.routes, _other_paths(config))
    router.include(batches_router(parts.batches, config, partial(_asks_model, inference, paths, config.root_path)))
    app = Starlette(routes=[StarletteRoute("/openapi.json", _openapi), *router.routes], exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # see RoutePaths
    # Made when it is first asked for: a server that starts does not wait for it.
    app.state.openapi = cache(partial(page, router.routes, routes, [*dialects], config))
    return _with_middlewares(app, paths, dialects, parts)


def _asks_model(inference: Seq[StarletteRoute], paths: RoutePaths, root: str, url: str) -> bool:
    """True if a POST to ``url``, which has no server's part, is answered by one of ``inference``."""
    path = without_root(unquote(url.partition("?")[0]), root)
    scope = {"type": "http", "method": "POST", "path": path, "headers": ()}
    scope["path"], _ = paths.of(scope)
    return any(route.matches(scope)[0] is Match.FULL for route in inference)


def _with_middlewares(app: Starlette, paths: RoutePaths, dialects: Dialects, parts: ServerParts) -> ASGIApp:
    """``app`` behind the middlewares. To be read from the bottom: the last one is the outermost.

    They are ours and not the framework's, whose layers would stand in front of it: here a layer without a second half
    is a plain function, and none wraps ``send``, so that hot routes can answer past it (``fast_response``).
    """
    config, keys, cors = parts.config, parts.keys, None
    root = config.root_path
    inner: ASGIApp = HotRoutes(RootPathRestored(app, root) if root else app)
    if keys is not None:
        inner = ApiKeys(inner, keys, open_paths(config, dialects))
    if config.cors_origins:
        cors = Cors(config.cors_origins, credentials=config.cors_credentials)
        inner = CorsPreflight(inner, cors)
    inner = Routing(inner, paths)
    if root:
        inner = RootPathRemoved(inner, root)
    inner = ErrorResponses(inner)
    if cors is not None:
        inner = CorsHeaders(inner, cors)
    inner = RequestIds(inner)
    return parts.telemetry(inner, app, untraced_paths(config, dialects))


def _other_paths(config: ServeConfig) -> dict[str, str]:
    """Paths that a cloud asks for, and those of the routes that answer."""
    paths = {config.health_path: "/health", config.predict_path: "/vertex"}
    return {path: own for path, own in paths.items() if path is not None}


def _page_of(config: ServeConfig) -> str | None:
    """Where browsers are led from ``/``: relative to it unless the proxy's prefix is known, as one may cut it off."""
    return (f"{config.root_path}/ui" if config.root_path else "ui") if config.ui else None


async def _openapi(request: Request) -> Response:
    return JSONResponse(request.app.state.openapi())


class RoutePaths:
    """Which route's path the path of a request means: the one under the mount point of the dialect that the request
    asks for, if that has it. Slashes at the end of other paths than ``/`` are left out: clients that get a redirect for
    a POST drop the body or give up. ``hot``: endpoints whose paths have no parameters, by them."""

    def __init__(
        self,
        dialects: Dialects,
        endpoints: Iterable[Endpoint],
        routes: Seq[StarletteRoute],
        other_paths: Mapping[str, str],
    ) -> None:
        self.hot = {endpoint.path: endpoint for endpoint in endpoints if "{" not in endpoint.path}
        self._dialects = dialects
        self._other_paths = other_paths
        self._routes = routes
        self._end_in_slashes = {route.path for route in routes if route.path.endswith("/")}

    def of(self, scope: Scope) -> tuple[str, Dialect | None]:
        """The path, and the dialect that answers there; None: it is ours. Raises what ``Dialects.of`` does."""
        path: str = scope["path"]
        if path[-1:] == "/" and path not in self._end_in_slashes:
            path = path.rstrip("/") or "/"
        path = self._other_paths.get(path, path)
        dialect, mounted = self._dialects.of(scope["headers"], path)
        if dialect is not None and (dialect.owns(path) or self._has(scope, mounted)):
            return mounted, dialect
        return path, None

    def _has(self, scope: Scope, path: str) -> bool:
        placed = {**scope, "path": path, "raw_path": path.encode()}
        return path in self.hot or any(route.matches(placed)[0] is Match.FULL for route in self._routes)


class Routing:
    """Middleware: finds the path, the form of errors, and the hot endpoint, which it leaves in the scope. Raises what
    ``RoutePaths.of`` does."""

    def __init__(self, app: ASGIApp, paths: RoutePaths) -> None:
        self._app = app
        self._paths = paths
        self._hot = paths.hot

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        asked = scope["path"]
        path, dialect = self._paths.of(scope)
        if dialect is not None:
            scope[FORM_KEY] = dialect.error_form
        if path != asked:
            scope[SCOPE_ASKED_PATH], scope["path"], scope["raw_path"] = asked, path, path.encode()
        endpoint = self._hot.get(path)
        if endpoint is not None and scope["method"] == "POST":
            scope[SCOPE_ENDPOINT] = endpoint
            scope[SCOPE_RECORD].route = endpoint.path
        return self._app(scope, receive, send)


class HotRoutes:
    """Answers the hot routes past the framework's routing and, where body and answer are whole, past ASGI's messages
    (docs/decisions.md, "The hot route"). ``app`` answers the others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint: Endpoint | None = scope.get(SCOPE_ENDPOINT)
        if endpoint is None:
            await self._app(scope, receive, with_answer_headers(scope, send))
            return
        response = await _answer(endpoint.answer, scope, receive)
        exchange = exchange_of(send)
        if exchange is not None and not exchange.flow.write_paused and isinstance(response, WholeResponse):
            response.raw_headers += scope[SCOPE_RECORD].begin_answer(response.status_code)
            exchange.answer(response)
        else:
            await response(scope, receive, with_answer_headers(scope, send))


async def _answer(endpoint: Answer, scope: Scope, receive: Receive) -> Response:
    """The answer of ``endpoint``, or an error response."""
    try:
        return await endpoint(Request(scope, receive))
    except BeiError as error:
        return error_response(error, scope)
    except ClientDisconnect:
        return Response(status_code=499)  # for the metrics: the client is gone
    except asyncio.CancelledError:  # as in ``http.routing``
        return error_response(stopped(), scope)
    except Exception:  # a border: a bug costs its own request the answer, and the client sees no traceback
        log.exception("unexpected error, request %s on %s", scope[SCOPE_REQUEST_ID], scope["path"])
        return error_response(UNEXPECTED, scope)
