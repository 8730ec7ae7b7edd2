"""Addresses for a test's length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.bei.multiprocess.chain import LoopThread, Place, places


@pytest.fixture
def place() -> Iterator[Place]:
    """Where one process accepts, or several, one after the other."""
    with places(1) as (made,):
        yield made


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def loop_thread(request: pytest.FixtureRequest) -> Iterator[LoopThread]:
    """An event loop that runs, of the server's kind and of Python's own."""
    make: Callable[[], asyncio.AbstractEventLoop] = request.param
    thread = LoopThread(make)
    yield thread
    thread.close()
