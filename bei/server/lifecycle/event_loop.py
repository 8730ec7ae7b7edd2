"""The event loop of a serving process."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import uvloop

from bei.server.http.file_limits import raise_limit
from bei.server.lifecycle.interpreter import switch_quickly


def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` to its end in this thread, in a process that is set up for serving."""
    switch_quickly()
    raise_limit()
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()
