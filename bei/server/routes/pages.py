"""``/ui`` and ``/docs``, the pages for people. Browsers load nothing for them from anywhere else.

``/ui`` is plain HTML, CSS and JavaScript modules (``bei/server/ui``), served as they lie there: links between them are
relative, so they hold behind any prefix. ``/docs`` is Swagger UI, whose files are those of the package
``fastapi-swagger``; nothing of that package is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bei.config.settings import ServeConfig
from bei.server.http.routing import ApiRouter
from bei.utils.html.document import CONTENT_STYLE

_FOLDER: Final = Path(__file__).parents[1] / "ui"
_PAGE: Final = "index.html"
_DOCS, _DOCS_MISSING = "docs.html", "docs-missing.html"
_DOCS_FILES = ("docs.js", "docs.css")
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Scripts and styles are files of this server, and no others; nothing of a page is evaluated, framed or sent elsewhere.
# Images may be data: those that somebody has chosen, and icons of Swagger UI.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Swagger UI writes styles into its elements.
_SWAGGER_POLICY: Final = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again with its ETag: a new version is seen at once
}

_SWAGGER_PACKAGE: Final = "fastapi_swagger"
_SWAGGER_FILES: Final = ("swagger-ui-bundle.js", "swagger-ui.css")


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str  # ETag


def _made(content: bytes, suffix: str) -> _File:
    return _File(content, _MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


@cache
def _read(path: Path) -> _File:
    return _made(path.read_bytes(), path.suffix)


@cache
def _files() -> dict[str, _File]:
    """The files under ``/ui``, by name."""
    found = {
        path.name: _read(path)
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _MEDIA_TYPES and path.name not in (_PAGE, _DOCS, _DOCS_MISSING, *_DOCS_FILES)
    }
    return {**found, "certificate.css": _made(CONTENT_STYLE.encode(), ".css")}


def page_paths(config: ServeConfig) -> set[str]:
    """Paths of the page and its files, if it is served. They are the same for all clients, and name no model."""
    return {"/ui", "/ui/", *(f"/ui/{name}" for name in _files())} if config.ui else set()


def swagger_folder() -> Path | None:
    """The folder of Swagger UI's files; None where their package is not installed."""
    spec = importlib.util.find_spec(_SWAGGER_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "resources"
    return folder if all((folder / name).is_file() for name in _SWAGGER_FILES) else None


def pages_router(config: ServeConfig) -> ApiRouter:
    """The routes of a server with ``config``. They are for browsers, and not in /openapi.json."""
    router = docs_router(config)
    if config.ui:
        _add_ui(router, config)
    return router


def _add_ui(router: ApiRouter, config: ServeConfig) -> None:
    keys = "yes" if config.asks_for_keys else "no"
    attributes = f'data-dialect="{config.dialect}" data-keys="{keys}"'
    page = (_FOLDER / _PAGE).read_text("utf-8").replace('data-dialect="bei" data-keys="no"', attributes)
    file = _made(page.encode(), ".html")

    @router.get("/ui", in_schema=False)
    async def ui(request: Request) -> Response:
        """The page."""
        return _answer(file, request, _POLICY)

    @router.get("/ui/", in_schema=False)
    async def ui_without_slash() -> Response:
        """Links of the page are relative to its path without the slash."""
        return RedirectResponse("../ui")

    @router.get("/ui/{name}", in_schema=False)
    async def ui_file(request: Request, name: str) -> Response:
        """A file of it."""
        return _answer(_known(_files().get(name)), request, _POLICY)


def docs_router(config: ServeConfig) -> ApiRouter:
    """``/docs`` and its files."""
    router = ApiRouter()

    @router.get("/docs", in_schema=False)
    async def docs(request: Request) -> Response:
        """Swagger UI or, without its files, what to install."""
        name, status = (_DOCS, 200) if swagger_folder() is not None else (_DOCS_MISSING, 501)
        page = (_FOLDER / name).read_text("utf-8").replace('"/openapi.json"', f'"{config.root_path}/openapi.json"')
        return _answer(_made(page.encode(), ".html"), request, _SWAGGER_POLICY, status)

    @router.get("/docs/", in_schema=False)
    async def docs_without_slash() -> Response:
        """As for ``/ui``."""
        return RedirectResponse("../docs")

    @router.get("/docs/{name}", in_schema=False)
    async def docs_file(request: Request, name: str) -> Response:
        """A file of it: Swagger UI's, or one of ours beside them."""
        folder = _FOLDER if name in _DOCS_FILES else swagger_folder() if name in _SWAGGER_FILES else None
        return _answer(_known(None if folder is None else _read(folder / name)), request, _SWAGGER_POLICY)

    return router


def _known(file: _File | None) -> _File:
    if file is None:
        raise HTTPException(404)  # which has our form
    return file


def _answer(file: _File, request: Request, policy: str, status: int = 200) -> Response:
    headers = {**_HEADERS, "content-security-policy": policy, "etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, status, headers, file.media_type)
