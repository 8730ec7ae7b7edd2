"""Applications that have batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bei.engine.fake import FakeEngine
from bei.server.batches import store, worker
from tests.bei.server.batches.served import KEYS, Clients
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS

MakeClients = Callable[..., Clients]


@pytest.fixture
def serve(make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeClients:
    """``serve(engine, **settings)``: an application with batches in ``tmp_path``, with two API keys if ``keys``.

    Nothing waits for a disk: no process ends here.
    """
    monkeypatch.setattr(worker, "_POLL_S", 0.01)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(store, "_SCHEMA", f"PRAGMA synchronous = OFF; {store._SCHEMA}")

    def made(engine: FakeEngine | None = None, *, keys: bool = False, **settings: Any) -> Clients:
        given = {"api_keys": tuple(f"{name}:{key}" for name, key in KEYS.items())} if keys else {}
        folder = str(tmp_path / "batches")
        return Clients(make_app(engine or FakeEngine(LIMITS), batch_dir=folder, **given, **settings))

    return made
