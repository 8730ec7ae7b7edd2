"""Managers for a test's length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bei.core import Engine
from tests.bei.scheduler.front import LIMITS, Front
from tests.bei.scheduler.hanging import LateEngine
from tests.support.engines import GatedEngine

MakeFront = Callable[..., Front]


@pytest.fixture
def make_front() -> Iterator[MakeFront]:
    """``make_front(engine, **options)``: options are those of SchedulingRules, and ``gate`` and ``reload``."""
    fronts: list[tuple[Front, Engine]] = []

    def make(engine: Engine, **options: Any) -> Front:
        fronts.append((Front(engine, **options), engine))
        return fronts[-1][0]

    yield make
    for front, engine in fronts:
        if isinstance(engine, GatedEngine):
            engine.open(engine.info.num_streams)
        front.close()


@pytest.fixture
def hung() -> Iterator[LateEngine]:
    """An engine that hangs until the test is over."""
    engine = LateEngine(LIMITS, num_streams=1)
    yield engine
    engine.open(100)
