"""A dialect: what another server answers on its own paths, with its field names, defaults, errors and statuses.

Bodies of two dialects may look alike on one path and want different answers, so each has paths of its own under
``/<name>``: a client that is pointed there cannot tell. Whoever cannot change a path sends the header X-Bei-Dialect, or
starts the server with ``--dialect``: a path is then looked for under the mount point first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from starlette.responses import Response

from bei.errors import BeiError, InvalidRequestError
from bei.metrics.registry import CONTENT_TYPE
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import METRICS
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.http.errors import ErrorForm
from bei.server.http.routing import ApiRouter
from bei.server.scope import names_of
from bei.server.status.whole_server import WholeServer

HEADER = b"x-bei-dialect"

# What requests get that ask for no dialect: the routes without a mount point, with our errors.
OWN = "bei"


class StatusErrorDetail(TypedDict):
    """``code`` is the status, as Infinity and vLLM have it."""

    message: str
    type: str
    param: str | None
    code: int


class StatusErrorBody(TypedDict):
    """OpenAI's nested form of an error."""

    error: StatusErrorDetail


class MessageBody(TypedDict):
    """An error: its message alone."""

    error: str


def message_alone(error: BeiError, status: int, _: str) -> tuple[int, object]:
    """The form of errors in the Open Inference Protocol and of Ollama."""
    return status, MessageBody(error=str(error))


@dataclass(frozen=True)
class Dialect:
    """``name`` is the mount point's, ``title`` the peer's own. ``routes`` have the paths of the peer. ``error_body``:
    what ``error_form`` makes, as a type for /openapi.json.

    ``reads``: routes without a body, with the paths of the peer. ``roots``: what may stand between the mount point and
    these paths; of some peers a base URL ends in ``/v1``. ``any_model``: a request may name a model that is not served;
    the only one that has the task then answers. ``at_root``: first segments of paths that clients ask for without the
    mount point. ``probes`` and ``metrics_path``: what of ``reads`` monitors ask for.
    """

    name: str
    title: str
    routes: Seq[Route[Any]]
    error_form: ErrorForm
    error_body: Any
    reads: ApiRouter | None = None
    roots: Seq[str] = ("",)
    any_model: bool = False
    probes: Seq[str] = ()
    metrics_path: str | None = None
    at_root: Seq[str] = ()

    def owns(self, path: str) -> bool:
        """True if the answer to ``path`` is this dialect's, whether it has the path or not."""
        return path[1:].partition("/")[0] in (self.name, *self.at_root)


def adjusted(route: Route[Any], adjust: Callable[[Any], None]) -> Route[Any]:
    """``route`` with a peer's defaults: ``adjust`` sets them in the body of a request that was parsed."""

    async def handle(request: Any, context: RequestContext) -> Reply:
        adjust(getattr(request, "body", request))
        return await route.handle(request, context)

    handle.__doc__ = route.handle.__doc__
    return replace(route, handle=handle)


def add_metrics(router: ApiRouter, path: str, server: WholeServer) -> None:
    """This server's metrics, under its own names, on a peer's path."""

    @router.get(path, summary="Prometheus metrics")
    @answers(bodies={200: str}, example=METRICS, media_type=CONTENT_TYPE)
    async def metrics_text() -> Response:
        """Exposition format; docs/reference.md lists the names."""
        return Response(await server.metrics(), media_type=CONTENT_TYPE)


def mounted(dialect: Dialect) -> Iterator[Route[Any]]:
    """The routes of ``dialect`` under its mount point."""
    for route in dialect.routes:
        for root in dialect.roots:
            path = f"/{dialect.name}{root}{route.path}"
            yield replace(route, path=path)
            if route.path == "/":  # clients that are given a server's address ask for exactly that
                yield replace(route, path=path[:-1])


class Dialects:
    """The dialects of a server, and which of them a request is in. ``default``: of requests that do not say."""

    def __init__(self, dialects: Seq[Dialect], default: str = OWN) -> None:
        self._by_name: Mapping[str, Dialect] = {dialect.name: dialect for dialect in dialects}
        self._at_root = {segment: dialect for dialect in dialects for segment in dialect.at_root}
        self._default = default

    def __iter__(self) -> Iterator[Dialect]:
        return iter(self._by_name.values())

    def of(self, headers: Iterable[tuple[bytes, bytes]], path: str) -> tuple[Dialect | None, str]:
        """The dialect that a request asks for, and the path on which it has it.

        Raises InvalidRequestError where the header names a dialect that there is not.
        """
        first = path[1:].partition("/")[0]
        mounted = self._by_name.get(first)
        if mounted is not None:
            return mounted, path
        at_root = self._at_root.get(first)
        if at_root is not None:
            return at_root, f"/{at_root.name}{path}"
        name = self._default
        if HEADER in names_of(headers):
            name = next(value for key, value in headers if key == HEADER).decode("latin-1").strip()
        if name == OWN:
            return None, path
        dialect = self._by_name.get(name)
        if dialect is None:
            names, header = ", ".join((OWN, *self._by_name)), HEADER.decode()
            raise InvalidRequestError(f"The header {header} must be one of {names}, not {name[:40]!r}.", header)
        return dialect, f"/{name}{path}"
