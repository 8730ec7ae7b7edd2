"""How urgent a request is: its lane and its deadline.

Headers:

X-Bei-Lane            interactive or bulk
Request-Timeout-Ms    milliseconds from now (Baseten's client)
Request-Deadline-Ms   milliseconds since the epoch (Baseten's client)
X-Request-Timeout     seconds from now

The field ``service_tier`` of a body is OpenAI's word for the lane: priority is interactive, flex is bulk, and auto and
default name none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from bei.errors import InvalidRequestError
from bei.port import Lane
from bei.server.scope import names_of

LANE_HEADER: Final = "x-bei-lane"
TIER_FIELD: Final = "service_tier"


class Urgency(NamedTuple):
    """``lane`` None: the request's size decides. ``deadline_s`` is on the monotonic clock; None: there is none.
    ``lane_param``: the header or the field that names the lane; empty: nothing that a client sends."""

    lane: Lane | None = None
    deadline_s: float | None = None
    lane_param: str = LANE_HEADER


# Of a line of a batch.
OF_A_BATCH = Urgency("bulk", lane_param="")

# The tier that a request is served in, by the lane that it is given.
ServedTier: TypeAlias = Literal["default", "priority", "flex"]
TIERS: Mapping[Lane | None, ServedTier] = {None: "default", "interactive": "priority", "bulk": "flex"}

_LANE_OF_TIER: Mapping[str, Lane | None] = {"auto": None, **{tier: lane for lane, tier in TIERS.items()}}
TIER_NAMES = (*_LANE_OF_TIER,)

_LANE = LANE_HEADER.encode()
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


_SHOWN_CHARS = 40  # of what a client sent
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
                message = f"The header {LANE_HEADER} must be {names}, not {_text(value)!r}."
                raise InvalidRequestError(message, LANE_HEADER)
        elif name in DEADLINES:
            header_s = DEADLINES[name].deadline_of(_number(name, value))
            deadline_s = header_s if deadline_s is None else min(deadline_s, header_s)
    return Urgency(lane, deadline_s)


def in_tier(asked: Urgency, tier: str) -> Urgency:
    """``asked``, in the lane of ``tier``. Raises InvalidRequestError for a tier that there is not, or where ``asked``
    names the other lane."""
    if tier not in _LANE_OF_TIER:
        names = " or ".join((", ".join(TIER_NAMES[:-1]), TIER_NAMES[-1]))
        raise InvalidRequestError(f"{TIER_FIELD} must be {names}, not {tier[:_SHOWN_CHARS]!r}.", TIER_FIELD)
    lane = _LANE_OF_TIER[tier]
    if lane is None or lane == asked.lane:
        return asked
    if asked.lane is not None:
        reason = f"{asked.lane_param} asks for {asked.lane}: send one of them"
        if not asked.lane_param:
            reason = f"lines of a batch are {asked.lane}: leave {TIER_FIELD} out"
        raise InvalidRequestError(f"{TIER_FIELD} {tier} is the lane {lane}, but {reason}.", TIER_FIELD)
    return asked._replace(lane=lane, lane_param=TIER_FIELD)


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
