"""What the routes of files and of batches share: whose request it is, pages of lists, lifetimes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request

from bei.errors import InvalidRequestError, RouteNotFoundError
from bei.server.auth.keys import Key
from bei.server.batches.store import LIFETIME_S, BatchStore, Page
from bei.server.http.errors import asked_path
from bei.server.scope import SCOPE_API_KEY

# OpenAI's bounds of ``expires_after``.
LEAST_LIFETIME_S = 3_600


class ExpiresAfter(msgspec.Struct):
    """How long a file is kept: seconds from its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=LEAST_LIFETIME_S, le=LIFETIME_S)]


def opened(store: BatchStore | None, request: Request) -> BatchStore:
    """Raises RouteNotFoundError where the server has no batches."""
    if store is None:
        raise RouteNotFoundError(
            f"{asked_path(request.scope)[:100]} is not served here: start the server with --batch-dir FOLDER to have "
            "files and batches."
        )
    return store


def owner_of(request: Request) -> str:
    """The name of the request's API key; empty where the server asks for none."""
    key: Key | None = request.scope.get(SCOPE_API_KEY)
    return "" if key is None else key.name


def page_of(limit: str | None, after: str | None, most: int, default: int, order: str | None = None) -> Page:
    """Of a query. Raises InvalidRequestError."""
    if limit is not None and not (limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise InvalidRequestError(f"limit must be a number from 1 to {most}, not {limit[:20]!r}.", "limit")
    if order == "asc":
        return Page(int(limit or default), after, "asc")
    if order not in (None, "desc"):
        raise InvalidRequestError(f"order must be asc or desc, not {order[:20]!r}.", "order")
    return Page(int(limit or default), after)
