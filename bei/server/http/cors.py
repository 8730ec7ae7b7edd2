"""Cross-origin requests: the pages whose scripts may ask this server from a browser (fetch.spec.whatwg.org, CORS)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from collections.abc import Sequence as Seq

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bei.config.settings import ANY_ORIGIN
from bei.server.scope import SCOPE_RECORD
from bei.server.telemetry.middleware import with_answer_headers

Header = tuple[bytes, bytes]

_METHODS = b"DELETE, GET, HEAD, POST"

# How long browsers may remember a preflight's answer; Chromium's limit is two hours.
_MAX_AGE_S = 3600

# Headers of an answer that scripts may read, beside those that they may always read.
_EXPOSED = (
    *("x-request-id", "x-truncated-inputs", "x-bei-warning", "x-bei-shape", "x-bei-dtype", "metadata"),
    *("retry-after", "retry-after-ms", "www-authenticate", "server-timing"),
    *("x-compute-type", "x-compute-time", "x-compute-characters", "x-compute-tokens"),
    *("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"),
)

# A browser's list of header names. The answer repeats it, because * does not include Authorization.
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MOST_BYTES_OF_NAMES = 2_000


class CorsHeaders:
    """Middleware: adds the headers of ``cors`` to every answer."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope[SCOPE_RECORD].answer_headers += self._cors.headers(scope["headers"])
        return self._app(scope, receive, send)


class CorsPreflight:
    """Middleware: answers the preflight requests of browsers."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        response = self._cors.preflight(scope)
        if response is None:
            return self._app(scope, receive, send)
        return response(scope, receive, with_answer_headers(scope, send))


class Cors:
    """``origins``: the origins of the pages, or * alone. ``credentials``: requests may carry cookies."""

    def __init__(self, origins: Seq[str], *, credentials: bool) -> None:
        self._is_for_all = ANY_ORIGIN in origins
        self._origins = frozenset(origin.lower().encode() for origin in origins)
        shared = [(b"access-control-expose-headers", ", ".join(_EXPOSED).encode())]
        if credentials:
            shared.append((b"access-control-allow-credentials", b"true"))
        self._shared = shared

    def headers(self, headers: Iterable[Header]) -> list[Header]:
        """Headers of the answer to a request with ``headers``."""
        origin = _value(headers, b"origin")
        if self._is_for_all:
            return [] if origin is None else [(b"access-control-allow-origin", b"*"), *self._shared]
        varies = [(b"vary", b"origin")]  # also without Origin: caches would give that answer to every origin
        if origin is None or origin.lower() not in self._origins:
            return varies
        return [(b"access-control-allow-origin", origin), *self._shared, *varies]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a preflight request of an allowed origin; None: ``scope`` is another request."""
        headers = scope["headers"]
        origin = _value(headers, b"origin")
        is_one = scope["method"] == "OPTIONS" and _value(headers, b"access-control-request-method") is not None
        if not is_one or origin is None or not (self._is_for_all or origin.lower() in self._origins):
            return None
        response = Response(status_code=204)
        response.raw_headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        ]
        names = _value(headers, b"access-control-request-headers")
        if names and len(names) <= _MOST_BYTES_OF_NAMES and _NAMES.fullmatch(names):
            response.raw_headers.append((b"access-control-allow-headers", names))
        return response


def _value(headers: Iterable[Header], name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
