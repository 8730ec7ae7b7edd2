"""The ASGI scope: keys under which parts of the server leave facts about a request, and the names of its headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Final

SCOPE_API_KEY: Final = "bei.key"  # auth.keys.Key; absent where the server asks for none
SCOPE_ASKED_PATH: Final = "bei.asked_path"  # str: what "path" was, without a root path; absent where it is that still
SCOPE_CONNECTION: Final = "bei.connection"  # int: which no other connection has, of any process of the server
SCOPE_ENDPOINT: Final = "bei.endpoint"  # endpoint.route.Endpoint; absent where the framework answers
SCOPE_BODY: Final = "bei.body"  # http.memory_budgets.Body
SCOPE_URGENCY: Final = "bei.urgency"  # auth.priority.Urgency; absent where the headers say it
SCOPE_REQUEST_ID: Final = "bei.request_id"  # str
SCOPE_RECORD: Final = "bei.record"  # telemetry.request_record.RequestRecord

_name = itemgetter(0)


def names_of(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The names of ``headers``, in lower case as an ASGI scope has them. One look shows that none asks for anything, as
    in most requests."""
    return map(_name, headers)
