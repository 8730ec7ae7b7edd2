"""A request's id: what the client sent as X-Request-Id, else a new one. Every answer has it, and so has the log."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as Seq

from bei.server.http.header_names import names_of

HEADER = b"x-request-id"

# Where an ASGI scope has it, as text.

# UUIDs, ULIDs, base64 and the ids of gateways; nothing that means something to a terminal, a log or a header.
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")


def request_id_of(headers: Seq[tuple[bytes, bytes]]) -> bytes:
    """The first that the client sent, if it can be one; else a new one of 32 hexadecimal digits."""
    if HEADER in names_of(headers):
        given = next(value for name, value in headers if name == HEADER)
        if _VALID.fullmatch(given):
            return given
    return b"%032x" % random.getrandbits(128)
