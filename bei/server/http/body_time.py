"""The time that a body has to arrive."""

from __future__ import annotations

from bei.errors import RequestTimeoutError

# An upload that is faster than this is never cut off, however large.
_MIN_BYTES_PER_S = 10_000


def body_due_s(since_s: float, timeout_s: float, num_bytes: int) -> float:
    """When a body that began at ``since_s`` is too slow, once ``num_bytes`` of it have arrived."""
    return since_s + timeout_s + num_bytes / _MIN_BYTES_PER_S


def body_too_slow(timeout_s: float) -> RequestTimeoutError:
    """Its error."""
    return RequestTimeoutError(
        f"The body did not arrive within {timeout_s:g} s and a second for every {_MIN_BYTES_PER_S} bytes of it: send "
        "it faster, or less at once."
    )
