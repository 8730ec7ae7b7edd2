"""When a client that was refused for want of memory shall come back."""

from __future__ import annotations

import random

_RETRY_S = 1.0
_JITTER = 1.2


def retry_s() -> float:
    """A second or a little more, each time another: clients that are refused together come back apart."""
    return _RETRY_S * random.uniform(1.0, _JITTER)
