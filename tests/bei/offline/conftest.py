"""Models over fake engines, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bei import Model
from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from tests.bei.offline.given import former_threads
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.engines import GatedEngine

OpenModel = Callable[..., Model]


@pytest.fixture(autouse=True)
def _threads_of_this_test_alone() -> None:
    former_threads.clear()
    former_threads.update(threading.enumerate())


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return save_artifact(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def open_model(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenModel]:
    """``open_model(engine, path=None, **settings)``: a Model of the tiny artifact, or of ``path``, over ``engine``. A
    gated engine lets the canary of the start through."""
    with ExitStack() as stack:

        def opened(engine: FakeEngine, path: Path | None = None, **settings: Any) -> Model:
            monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: engine)
            if isinstance(engine, GatedEngine):
                engine.let_one_through()
            settings = {"tune": "off", "tokenizer_threads": 1, **settings}
            model = Model(path or artifact.path, **settings)
            stack.callback(model.close)
            if isinstance(engine, GatedEngine):
                engine.wait_entered()
                stack.callback(engine.open, engine.info.num_streams)  # before it is closed
            return model

        yield opened


@pytest.fixture
def model(open_model: OpenModel) -> Model:
    """Over a fake engine that answers at once."""
    return open_model(FakeEngine(LIMITS))
