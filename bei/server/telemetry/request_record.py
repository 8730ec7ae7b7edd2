"""Facts about a request, gathered on its way for metrics, the access log and traces; and its Server-Timing header.

Server-Timing (w3.org/TR/server-timing) has the stages that the trace has, but for the sending: an answer begins before
it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.metrics.request_stages import microseconds, totals_us
from bei.metrics.request_timing import Timing
from bei.port import Lane

SERVER_TIMING_HEADER = b"server-timing"

UNMATCHED = "unmatched"  # the route of requests that no route takes

Inputs: TypeAlias = Seq[object]


class RequestRecord:
    """``model`` and ``num_inputs``: the model that is asked, for so many inputs. ``lane``: set on admission.
    ``timing``: None where nobody needs the times. ``route``: the path as its route has it, parameters by name.
    ``status``: 500 until an answer begins. ``answer_headers``: headers of every answer, whoever makes it.
    """

    # Defaults of the class: most requests set some of them only.
    model: str | None = None
    lane: Lane | None = None
    num_inputs = 0
    timing: Timing | None = None
    has_server_timing = False
    route = UNMATCHED
    status = 500

    def __init__(self) -> None:
        self.answer_headers: list[tuple[bytes, bytes]] = []

    def asks(self, model: str, inputs: Inputs) -> None:
        """Count ``inputs`` for ``model``. Called for each part of a request that has several."""
        self.model = model
        self.num_inputs += len(inputs)

    def begin_answer(self, status: int) -> list[tuple[bytes, bytes]]:
        """Note that an answer begins. Returns the headers that every answer gets. To be called once."""
        self.status = status
        if self.timing is not None:
            self.timing.answers()
            if self.has_server_timing:
                self.answer_headers.append((SERVER_TIMING_HEADER, _server_timing(self.timing)))
        return self.answer_headers


def _server_timing(timing: Timing) -> bytes:
    """Milliseconds of each stage, and of all since the request's headers, of an answer that has begun."""
    assert timing.answered_s is not None
    total_us = microseconds(timing.answered_s - timing.begun_s)
    durations = {**totals_us(timing.stages), "total": total_us}
    return ", ".join([f"{name};dur={us // 1000}.{us % 1000:03}" for name, us in durations.items()]).encode()
