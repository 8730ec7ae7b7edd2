"""Routes of the framework, Starlette's: what their functions take and return, and how /openapi.json describes them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bei.server.http.errors import stopped

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class ApiRoute(Route):
    """Answers exactly ``methods``. ``summary`` and the docstring of ``function`` describe it.

    ``function`` is a coroutine function of the request, of parameters of the path, and of optional ones of the query.
    It returns a Response, or what becomes one in JSON.
    """

    def __init__(
        self, path: str, function: Callable[..., Any], methods: Seq[str], summary: str = "", *, in_schema: bool = True
    ) -> None:
        name = function.__name__
        super().__init__(path, _endpoint(function), methods=methods, name=name, include_in_schema=in_schema)
        self.methods = set(methods)  # Starlette adds HEAD to GET
        self.function = function
        self.summary = summary
        self.description = inspect.getdoc(function) or ""

    @property
    def query(self) -> list[str]:
        """Names of parameters of the query."""
        names = inspect.signature(self.function).parameters
        return [name for name in names if name != "request" and name not in self.param_convertors]


class ApiRouter:
    """A list of routes. Decorators add to it; ``include`` takes over those of another one."""

    def __init__(self) -> None:
        self.routes: list[ApiRoute] = []

    def get(self, path: str, summary: str = "", *, in_schema: bool = True) -> Callable[[FunctionT], FunctionT]:
        """A route that answers GET and HEAD (RFC 9110, section 9.1)."""
        return self.on(("GET", "HEAD"), path, summary, in_schema=in_schema)

    def post(self, path: str, summary: str) -> Callable[[FunctionT], FunctionT]:
        return self.on(("POST",), path, summary)

    def on(
        self, methods: Seq[str], path: str, summary: str = "", *, in_schema: bool = True
    ) -> Callable[[FunctionT], FunctionT]:
        """A route that answers ``methods``."""

        def add(function: FunctionT) -> FunctionT:
            self.routes.append(ApiRoute(path, function, methods, summary, in_schema=in_schema))
            return function

        return add

    def include(self, other: ApiRouter, prefix: str = "") -> None:
        """Add the routes of ``other`` behind ``prefix``."""
        for route in other.routes:
            assert route.methods is not None  # ApiRoute sets them
            methods, in_schema = sorted(route.methods), route.include_in_schema
            self.routes.append(
                ApiRoute(prefix + route.path, route.function, methods, route.summary, in_schema=in_schema)
            )


def _endpoint(function: Callable[..., Any]) -> Callable[[Request], Awaitable[Response]]:
    """``function`` as Starlette calls it: with the request alone."""
    names = inspect.signature(function).parameters

    async def endpoint(request: Request) -> Response:
        given = {"request": request, **request.path_params}
        arguments = {name: given[name] if name in given else request.query_params.get(name) for name in names}
        try:
            found = await function(**arguments)
        except asyncio.CancelledError:  # a stopping server has waited long enough for the rest of the request
            raise stopped() from None
        return found if isinstance(found, Response) else JSONResponse(found)

    return endpoint
