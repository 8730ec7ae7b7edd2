"""The ASGI middleware that refuses requests without a valid API key, or beyond the rates of their key."""

from __future__ import annotations

from collections.abc import Awaitable, Set

from starlette.types import ASGIApp, Receive, Scope, Send

from bei.server.auth.keys import Key, Keyring
from bei.server.scope import SCOPE_API_KEY


class ApiKeys:
    """Checks the API key of each request, except GET and HEAD requests to ``open_paths``.

    Raises UnauthorizedError, RateLimitedError.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, open_paths: Set[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["path"] not in self._open_paths or scope["method"] not in ("GET", "HEAD"):
            self._check(scope)
        return self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        key: Key | None = scope.get(SCOPE_API_KEY)
        if key is None:
            self._keys.check(scope)
        else:  # a request that this process makes in the name of a client, as for a line of a batch
            key.take_request()
