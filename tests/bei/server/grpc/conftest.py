"""Servers of gRPC for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bei.server.app import App
from tests.bei.server.grpc.served import Grpc, Serve


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(app, **settings)``: a server of gRPC over ``app``."""
    made: list[Grpc] = []

    def start(app: App, **settings: Any) -> Grpc:
        made.append(Grpc(app, **settings))
        return made[-1]

    yield start
    for served in made:
        served.close()
