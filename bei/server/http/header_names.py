"""Which headers a request has, in one look: most requests have none of those that ask for something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter

_name = itemgetter(0)


def names_of(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The names of ``headers``, in lower case as an ASGI scope has them."""
    return map(_name, headers)
