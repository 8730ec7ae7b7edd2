"""check_ready: the canary goes through the whole path and must come back as it did at build time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bei.artifact.manifest import Artifact, OutputInfo
from bei.engine.fake import FakeEngine
from bei.engine.postprocess import unit_length
from bei.errors import EngineError, ShuttingDownError
from tests.support.artifacts import CANARY_TEXT, LIMITS, save_artifact, token_ids
from tests.support.engines import GatedEngine, PickyEngine, TokenEngine, sequences_of, token_rows
from tests.support.services import infer, run_async, running_service


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


def test_ready_computes_the_canary_without_the_prompt(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "prompted", prompts={"query": "query: "}, default_prompt_name="query")

    async def test() -> None:
        engine = FakeEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            await service.check_ready()
        assert sequences_of(engine.batches[0]) == [token_ids(CANARY_TEXT)]

    run_async(test)


def test_after_the_first_canary_a_fresh_answer_is_proof_enough(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.service.service._FRESH_S", 3600.0)

    async def test() -> None:
        engine = FakeEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            await infer(service, ["cat"])
            await service.check_ready()
            assert [sequences_of(batch) for batch in engine.batches] == [[token_ids("cat")], [token_ids(CANARY_TEXT)]]
            await service.check_ready()
            assert len(engine.batches) == 2

    run_async(test)


def test_an_answer_of_a_cache_is_no_proof(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.service.service._FRESH_S", 0.0)

    async def test() -> None:
        engine = FakeEngine(LIMITS)
        async with running_service(artifact, engine, cache_megabytes=1) as service:
            for _ in range(2):
                await infer(service, ["cat"])  # the second time from the cache
                await service.check_ready()
        canary = [token_ids(CANARY_TEXT)]
        assert [sequences_of(batch) for batch in engine.batches] == [[token_ids("cat")], canary, canary]

    run_async(test)


def test_a_wrong_canary_vector_is_not_ready_however_often_one_asks(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "other", canary=[0, 0, 0, 0, 1, 0, 0, 0])

    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            for _ in range(2):
                await infer(service, ["cat"])  # an answer, but nothing says that it is the right one
                with pytest.raises(EngineError, match=r"cosine 0\.0000.*Build the artifact again"):
                    await service.check_ready()

    run_async(test)


@pytest.mark.parametrize("is_right", [True, False])
def test_the_canary_may_be_the_first_token_of_an_output_per_token(tmp_path: Path, is_right: bool) -> None:
    row = unit_length(token_rows(np.array(token_ids(CANARY_TEXT), np.int32)))[0 if is_right else 1]
    outputs = [OutputInfo(name="embedding", dimension=8), OutputInfo(name="token_ids", dimension=2, per_token=True)]
    artifact = save_artifact(tmp_path / "tokens", outputs=outputs, output="token_ids", canary=row.tolist())

    async def test() -> None:
        async with running_service(artifact, TokenEngine(LIMITS)) as service:
            if is_right:
                await service.check_ready()
            else:
                with pytest.raises(EngineError, match="Build the artifact again"):
                    await service.check_ready()

    run_async(test)


def test_a_failing_engine_is_not_ready(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, PickyEngine(LIMITS, lambda _: True)) as service:
            with pytest.raises(EngineError):
                await service.check_ready()

    run_async(test)


def test_an_engine_that_does_not_answer_in_time_is_not_ready(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.service.service._CANARY_TIMEOUT_S", 0.001)

    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            with pytest.raises(EngineError, match="did not answer its canary"):
                await service.check_ready()

    run_async(test)


def test_a_draining_service_is_not_ready(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            service.begin_drain()
            with pytest.raises(ShuttingDownError):
                await service.check_ready()

    run_async(test)


def test_a_closed_service_is_neither_alive_nor_ready(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            await asyncio.get_running_loop().run_in_executor(None, service.close)
            assert not service.is_alive
            with pytest.raises(EngineError, match="restart the server"):
                await service.check_ready()

    run_async(test)
