"""Calls on which nothing is under way: they end after the time that a connection of HTTP may be idle, and a call of one
message after the time that a body may take.

An open call holds a place of ``max_connections``, and its key is looked at with each message: without a bound, who has
no key, or one that was taken back, would keep places from others for as long as it answers pings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeVar

from bei.errors import BeiError, MalformedRequestError, RequestTimeoutError
from bei.server.grpc.calls import code_of, error_metadata

M = TypeVar("M")


async def next_message(iterator: AsyncIterator[M]) -> M | None:
    """The next message; None: there is none any more."""
    try:
        return await iterator.__anext__()
    except StopAsyncIteration:
        return None


async def end_idle(context: Any, idle_s: float) -> NoReturn:
    """End the call of ``context``, which had no message for ``idle_s`` after its last answer."""
    await _end(
        context,
        RequestTimeoutError(
            f"The stream had no message for {idle_s:g} s (keep_alive_timeout): open another when there is one, or send "
            "them sooner."
        ),
    )


async def only_message(context: Any, timeout_s: float) -> Any:
    """The message of a call that has one. The library reads it before it calls a handler of such calls, for which it
    would wait for ever: they are handled as streams of one message."""
    import grpc

    reader = asyncio.current_task()
    assert reader is not None
    is_late = False

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        reader.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, give_up)
    try:
        found = await context.read()
    except asyncio.CancelledError:
        if not is_late:
            raise
        await _end(
            context,
            RequestTimeoutError(
                f"The message did not arrive within {timeout_s:g} s (body_timeout): send it faster, or less at once."
            ),
        )
    finally:
        timer.cancel()
    if found is grpc.aio.EOF:
        await _end(context, MalformedRequestError("The call has no message: send one."))
    return found


async def _end(context: Any, error: BeiError) -> NoReturn:
    await context.abort(code_of(error), str(error), tuple(error_metadata(error)))
    raise AssertionError("abort raises")
