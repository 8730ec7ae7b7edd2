"""How urgent a request is, by its headers: its lane and its deadline.

X-Bei-Lane            interactive or bulk
Request-Timeout-Ms    milliseconds from now (Baseten's client)
Request-Deadline-Ms   milliseconds since the epoch (Baseten's client)
X-Request-Timeout     seconds from now
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, get_args

from bei.errors import InvalidRequestError
from bei.port import Lane
from bei.server.scope import names_of


class Urgency(NamedTuple):
    """``lane`` None: the request's size decides. ``deadline_s`` is on the monotonic clock; None: there is none."""

    lane: Lane | None = None
    deadline_s: float | None = None


_LANE = b"x-bei-lane"
_LANES: dict[str, Lane] = {lane: lane for lane in get_args(Lane)}


class Deadline(NamedTuple):
    """A header with a number; ``deadline_of`` turns it into a deadline on the monotonic clock."""

    header: str
    description: str
    deadline_of: Callable[[float], float]


_IN_MS = Deadline("Request-Timeout-Ms", "Milliseconds from now.", lambda number: time.monotonic() + number / 1000)
_AT_MS = Deadline(
    "Request-Deadline-Ms",
    "Milliseconds since the epoch.",
    lambda number: time.monotonic() + number / 1000 - time.time(),
)
_IN_S = Deadline("X-Request-Timeout", "Seconds from now.", lambda number: time.monotonic() + number)

DEADLINES: Mapping[bytes, Deadline] = {one.header.lower().encode(): one for one in (_IN_MS, _AT_MS, _IN_S)}


_NAMES = frozenset((_LANE, *DEADLINES))
_UNSAID = Urgency()


def urgency_of(headers: Seq[tuple[bytes, bytes]]) -> Urgency:
    """The lane and the deadline in ``headers``; of several deadlines the earliest. Raises InvalidRequestError, which
    names the header."""
    if _NAMES.isdisjoint(names_of(headers)):
        return _UNSAID
    lane: Lane | None = None
    deadline_s: float | None = None
    for name, value in headers:
        if name == _LANE:
            lane = _LANES.get(_text(value).lower())
            if lane is None:
                names = " or ".join(_LANES)
                raise InvalidRequestError(f"The header x-bei-lane must be {names}, not {_text(value)!r}.", "x-bei-lane")
        elif name in DEADLINES:
            header_s = DEADLINES[name].deadline_of(_number(name, value))
            deadline_s = header_s if deadline_s is None else min(deadline_s, header_s)
    return Urgency(lane, deadline_s)


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip()


def _number(name: bytes, value: bytes) -> float:
    try:
        number = float(_text(value))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        header = name.decode()
        raise InvalidRequestError(f"The header {header} must be a number from 0 on, not {_text(value)!r}.", header)
    return number
