"""Fixtures of the HTTP tests: one application for a module's good requests, and a factory for special ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from tests.bei.server.app import App
from tests.bei.server.kinds import save_kinds
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.engines import GatedEngine

MakeApp = Callable[..., App]


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return save_artifact(tmp_path_factory.mktemp("artifacts") / "tiny")


@pytest.fixture(scope="module")
def app(artifact: Artifact) -> Iterator[App]:
    app = App((artifact, FakeEngine(LIMITS)), max_client_batch_size=32, payload_limit=100_000)
    yield app
    app.close()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """An application that serves a model of every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    app = App(*save_kinds(folder), max_client_batch_size=8, payload_limit=100_000)
    yield app
    app.close()


@pytest.fixture
def make_app(artifact: Artifact) -> Iterator[MakeApp]:
    """``make_app(engine, **settings)``: an application that serves the tiny artifact."""
    made: list[tuple[App, FakeEngine]] = []

    def make(engine: FakeEngine, *others: tuple[Artifact, FakeEngine], **settings: Any) -> App:
        made.append((App((artifact, engine), *others, **settings), engine))
        return made[-1][0]

    yield make
    for app, engine in made:
        if isinstance(engine, GatedEngine):
            engine.open()
        app.close()


@pytest.fixture
def second_artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "second", name="org/second", embedding={"normalize": False})
