"""The application for other ASGI servers: made on the loop, with models, keys and an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from bei.artifact.manifest import Artifact, Manifest
from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from bei.errors import ConfigError, EngineError
from bei.server.make_app import WholeApp, make_app
from tests.support.services import run_async

KEY = "0123456789abcdef"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    made: list[FakeEngine] = []

    def load(folder: Path, manifest: Manifest, *_: Any) -> FakeEngine:
        made.append(FakeEngine(manifest.limits))
        return made[-1]

    monkeypatch.setattr("bei.service.loader.load_engine", load)
    return made


async def embed(whole: WholeApp, **headers: str) -> int:
    transport = httpx.ASGITransport(whole.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://bei.test") as client:
        return (await client.post("/v1/embeddings", json={"input": "hello"}, headers=headers)).status_code


def test_the_whole_application_answers_until_it_is_closed(artifact: Artifact, engines: list[FakeEngine]) -> None:
    async def test() -> None:
        config = ServeConfig(tune="off", tokenizer_threads=1, api_keys=(KEY,))
        async with await make_app([artifact], config) as whole:
            assert [service.name for service in whole.models] == [artifact.manifest.name]
            assert await embed(whole) == 401
            assert await embed(whole, authorization=f"Bearer {KEY}") == 200
        assert await embed(whole, authorization=f"Bearer {KEY}") == 503
        assert len(engines) == 1

    run_async(test)


def test_several_processes_are_for_bei_serve(artifact: Artifact) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="bei serve"):
            await make_app([artifact], ServeConfig(http_workers=2))

    run_async(test)


@pytest.mark.parametrize(
    ("times", "alias", "message"),
    [(2, (), "Two models are called 'tiny'"), (1, ("a=b",), "alias 'a=b' means no served model: name one of tiny")],
)
def test_names_that_cannot_be_are_refused_before_anything_is_loaded(
    times: int, alias: tuple[str, ...], message: str, artifact: Artifact, engines: list[FakeEngine]
) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=message):
            await make_app([artifact.path] * times, ServeConfig(tune="off", alias=alias))

    run_async(test)
    assert engines == []


def test_an_engine_that_answers_otherwise_than_at_build_time_gets_no_request(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Other(FakeEngine):
        def run(self, batch: Any, outputs: Any = None) -> Any:
            return {name: -rows for name, rows in super().run(batch).items()}

        def close(self) -> None:
            closed.append("engine")

    monkeypatch.setattr("bei.service.loader.load_engine", lambda folder, manifest, *_: Other(manifest.limits))

    async def test() -> None:
        with pytest.raises(EngineError, match="canary"):
            await make_app([artifact], ServeConfig(tune="off", tokenizer_threads=1))
        assert closed == ["engine"]

    run_async(test)
