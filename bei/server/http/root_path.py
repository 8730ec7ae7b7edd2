"""A prefix that a proxy has in front of every path. Proxies cut it off or leave it; routes are found both ways.

No route begins as the prefix does (``bei.config.settings.FIRST_SEGMENTS``), so what a path means is never in doubt.
"""

from __future__ import annotations

from starlette.types import Scope


def without_root(scope: Scope, root: str) -> Scope:
    """``scope`` with the path that routes have. ``root`` may be empty."""
    path: str = scope["path"]
    if not root or not (path == root or path.startswith(root + "/")):
        return scope
    return {**scope, "path": path[len(root) :] or "/"}


def with_root(scope: Scope, root: str) -> Scope:
    """``scope`` as ASGI has it, with the whole path: pages and redirects of the framework then lead through the proxy.

    The framework takes the prefix off again. ``root`` may be empty.
    """
    if not root:
        return scope
    path = root + scope["path"]
    return {**scope, "root_path": root, "path": path, "raw_path": path.encode()}
