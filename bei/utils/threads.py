"""Work that is too long for the event loop, in threads of its own.

A thread alone is not enough: orjson, msgspec and numpy hold the interpreter's lock for the length of a call. What goes
here is made of calls of a few milliseconds at most; between them, and inside plain Python, the loop gets its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")

# More would only contend for the interpreter's lock; with one, the work of one request would wait for another's.
_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="bei-offload")


async def off_loop(work: Callable[..., ResultT], *args: object) -> ResultT:
    """``work(*args)``, computed in a thread. If the caller is cancelled, it still runs to its end; nobody sees it."""
    try:
        computed = asyncio.get_running_loop().run_in_executor(_pool, work, *args)
    except RuntimeError:  # the interpreter exits: it waits for threads that are at work, but pools take nothing new
        return work(*args)
    try:
        return await computed
    finally:
        # An error's traceback has this frame, and the future has the error: what ``work`` had made would stay until the
        # garbage collector comes by.
        del computed
