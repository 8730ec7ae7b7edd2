"""Threads: starts them, and runs work in them that would block the event loop for too long.

orjson, msgspec and numpy hold the interpreter's lock during a call, so the work must consist of calls of a few
milliseconds; the loop runs between them, and inside plain Python code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")

# More threads would contend for the interpreter's lock; with one, requests would wait for each other's work.
_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="bei-offload")


def started(work: Callable[[], None], name: str) -> threading.Thread:
    """A thread that does ``work``, and does not keep the process from ending."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


async def off_loop(work: Callable[..., ResultT], *args: object) -> ResultT:
    """The result of ``work(*args)``, run in a thread. If the caller is cancelled, the work still runs to its end."""
    try:
        computed = asyncio.get_running_loop().run_in_executor(_pool, work, *args)
    except RuntimeError:  # at interpreter exit, thread pools accept no new work
        return work(*args)
    try:
        return await computed
    finally:
        # The error's traceback refers to this frame, and the future to the error: break the cycle, or the data of
        # ``work`` would stay until the garbage collector runs.
        del computed
