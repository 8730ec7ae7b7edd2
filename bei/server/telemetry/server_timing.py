"""Server-Timing (w3.org/TR/server-timing): the stages of a request, in its answer.

The same as in its trace. Answers begin before they are sent, so the sending is in the trace alone.
"""

from __future__ import annotations

from bei.metrics.request_stages import microseconds, totals_us
from bei.metrics.request_timing import Timing

HEADER = b"server-timing"


def server_timing(timing: Timing) -> bytes:
    """The header of an answer that has begun: milliseconds of each stage, and of all since the request's headers."""
    assert timing.answered_s is not None
    total_us = microseconds(timing.answered_s - timing.begun_s)
    durations = {**totals_us(timing.stages), "total": total_us}
    return ", ".join([f"{name};dur={us // 1000}.{us % 1000:03}" for name, us in durations.items()]).encode()
