"""A prefix that a proxy has in front of every path. Proxies cut it off or leave it; routes are found both ways.

No route begins with the prefix (``bei.config.settings.FIRST_SEGMENTS``), so paths are unambiguous.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import ASGIApp, Receive, Scope, Send


def without_root(path: str, root: str) -> str:
    """``path`` as routes have it."""
    if path == root or path.startswith(root + "/"):
        return path[len(root) :] or "/"
    return path


class RootPathRemoved:
    """Middleware: the path becomes that of the routes."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope["path"] = without_root(scope["path"], self._root)
        return self._app(scope, receive, send)


class RootPathRestored:
    """Middleware: the path is whole again, as ASGI has it, so that pages and redirects of the framework lead through
    the proxy. The framework takes the prefix off by itself."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path = self._root + scope["path"]
        scope.update(root_path=self._root, path=path, raw_path=path.encode())
        return self._app(scope, receive, send)
