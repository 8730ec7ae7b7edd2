"""A trace: which requests come when, in which lane, with how many texts of how many tokens. Kept as JSON lines.

{"lane": "interactive", "tokens": [12], "at_s": 0.52}      comes 0.52 s after the start, whatever the server does
{"lane": "bulk", "tokens": [80, 31, 204]}                  a backfill's: comes when one before it has been answered
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from bei.errors import ConfigError
from bei.port import Lane
from bei.utils.full_disk import write_whole
from bei.utils.named_files import MOST_TEXTS_BYTES, open_named

_MOST_LINE_BYTES = 8_000_000


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request. ``tokens``: of each text, special tokens included. ``at_s``: seconds from the start; None: a
    backfill's."""

    lane: Lane
    tokens: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)], ...], msgspec.Meta(min_length=1)]
    at_s: Annotated[float, msgspec.Meta(ge=0, le=1e7)] | None = None


_request_decoder = msgspec.json.Decoder(TraceRequest)


@dataclass(frozen=True)
class Trace:
    """A trace. ``arrivals`` have (ascending) times: an open loop. ``backfill`` is a closed loop: ``concurrency`` of its
    requests are in flight at a time, in order, and none begins after ``seconds``.

    ``seconds``: the end of the measurement; None: the last arrival, or the last answer if there are no arrivals.
    """

    arrivals: Seq[TraceRequest] = ()
    backfill: Seq[TraceRequest] = ()
    concurrency: int = 1
    seconds: float | None = None

    def __post_init__(self) -> None:
        times = [request.at_s for request in self.arrivals]
        if None in times or times != sorted(time for time in times if time is not None):
            raise ValueError("arrivals must have ascending times")
        if any(request.at_s is not None for request in self.backfill):
            raise ValueError("requests of a backfill have no times")
        if self.concurrency < 1 or not (self.arrivals or self.backfill):
            raise ValueError("a trace needs requests, and a concurrency of at least 1")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"a trace of {self.seconds} s")

    @property
    def num_texts(self) -> int:
        return sum(len(request.tokens) for request in (*self.arrivals, *self.backfill))


def write_trace(path: Path, trace: Trace) -> None:
    """Write one request a line, the backfill's last. ``concurrency`` and ``seconds`` are not stored."""
    encode = msgspec.json.Encoder().encode_lines
    write_whole(path, encode([*trace.arrivals, *trace.backfill]))


def read_trace(path: Path, *, concurrency: int = 1, seconds: float | None = None) -> Trace:
    """The inverse of ``write_trace``; lines may be in any order. Raises ConfigError."""
    arrivals: list[tuple[float, TraceRequest]] = []
    backfill: list[TraceRequest] = []
    with open_named("The trace", path, MOST_TEXTS_BYTES) as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > _MOST_LINE_BYTES:
                raise ConfigError(f"{path}, line {number}: longer than {_MOST_LINE_BYTES} bytes.")
            if not line.strip():
                continue
            try:
                request = _request_decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number} is no request of a trace: {error}.") from error
            if request.at_s is None:
                backfill.append(request)
            else:
                arrivals.append((request.at_s, request))
    if not arrivals and not backfill:
        raise ConfigError(f"{path} holds no requests: a trace has a JSON object a line.")
    arrivals.sort(key=lambda pair: pair[0])
    return Trace([request for _, request in arrivals], backfill, concurrency, seconds)
