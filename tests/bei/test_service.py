"""InferenceService over fake engines: admission, draining, prompts, dimensions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bei.artifact import Artifact
from bei.config import ServeConfig
from bei.engine.fake import FakeEngine
from bei.errors import (
    ArtifactWrongTargetError,
    EngineError,
    InvalidRequestError,
    NonFiniteOutputError,
    OverloadedError,
    ShuttingDownError,
)
from bei.metrics import Metrics
from bei.service import InferenceService, load_service
from tests.artifacts import LIMITS, VOCAB_SIZE, expected_vectors, save_artifact, token_ids
from tests.bei.services import entered, run_async, running_service
from tests.engines import GatedEngine, NaNEngine, PickyEngine, sequences_of


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


def test_texts_are_embedded_in_order_with_their_token_count(artifact: Artifact) -> None:
    async def test() -> None:
        texts = [f"cat {index % 10} " * (1 + index % 5) for index in range(100)]
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await service.embed_texts(texts)
        np.testing.assert_array_equal(answer.vectors, expected_vectors([token_ids(text) for text in texts]))
        assert answer.num_tokens == sum(len(token_ids(text)) for text in texts)
        assert answer.truncated == []

    run_async(test)


def test_token_ids_are_embedded_exactly_as_given(artifact: Artifact) -> None:
    async def test() -> None:
        inputs = [[5], [2, 7, 3], [VOCAB_SIZE - 1] * LIMITS.max_seq_len]
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await service.embed_token_ids(inputs)
        np.testing.assert_array_equal(answer.vectors, expected_vectors(inputs))
        assert answer.num_tokens == 4 + LIMITS.max_seq_len

    run_async(test)


def test_truncated_inputs_are_reported_by_position(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await service.embed_texts(["a", "a " * 100, "b", "b " * 15])
        assert answer.truncated == [1, 3]
        assert answer.num_tokens == 3 + 16 + 3 + 16

    run_async(test)


def test_vectors_keep_their_length_where_the_model_does_not_normalize(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "raw", embedding={"normalize": False})

    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await service.embed_token_ids([[5, 6]])
        np.testing.assert_array_equal(answer.vectors, [[2, 5, 6, 11, 0, 0, 0, 1]])

    run_async(test)


def test_the_default_prompt_stands_before_texts_but_not_before_token_ids(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "passage": "the "}
    artifact = save_artifact(tmp_path / "prompted", prompts=prompts, default_prompt_name="query")

    async def test() -> None:
        engine = FakeEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            of_text = await service.embed_texts(["cat"])
            await service.embed_token_ids([[2, 9, 3]])
        assert [sequences_of(batch) for batch in engine.batches] == [[token_ids("query: cat")], [[2, 9, 3]]]
        assert of_text.num_tokens == len(token_ids("query: cat"))

    run_async(test)


def test_without_a_default_prompt_texts_are_embedded_as_they_are(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "prompted", prompts={"query": "query: "})

    async def test() -> None:
        engine = FakeEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            await service.embed_texts(["cat"])
        assert sequences_of(engine.batches[0]) == [token_ids("cat")]

    run_async(test)


# Dimensions


def test_dimensions_truncate_and_restore_unit_length(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await service.embed_token_ids([[5, 6, 7]], dimensions=3)
        np.testing.assert_allclose(answer.vectors, expected_vectors([[5, 6, 7]], 3), rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(answer.vectors, axis=1), 1.0, rtol=1e-6)

    run_async(test)


@pytest.mark.parametrize("dimensions", [0, -1, 9, 10**30])
def test_dimensions_must_be_within_the_width(artifact: Artifact, dimensions: int) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            with pytest.raises(InvalidRequestError, match="from 1 to 8") as caught:
                await service.embed_texts(["a"], dimensions)
        assert caught.value.param == "dimensions"

    run_async(test)


def test_dimensions_must_be_in_the_matryoshka_list_or_the_full_width(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "matryoshka", embedding={"matryoshka_dimensions": [2, 4]})

    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            for dimensions in (2, 4, 8):
                assert (await service.embed_texts(["a"], dimensions)).vectors.shape == (1, dimensions)
            for dimensions in (1, 3, 7, 9):
                with pytest.raises(InvalidRequestError, match=f"dimensions 2, 4, 8, not {dimensions}"):
                    await service.embed_texts(["a"], dimensions)

    run_async(test)


def test_a_model_that_does_not_embed_says_what_it_can_do(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "classifier", tasks=["classify"], embedding=None)

    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            with pytest.raises(InvalidRequestError, match="can do: classify"):
                await service.embed_texts(["a"])

    run_async(test)


# Token ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "is empty"),
        ([0] * (LIMITS.max_seq_len + 1), "has 17 token ids, the model takes up to 16"),
        ([1, -1], f"from 0 to {VOCAB_SIZE - 1}"),
        ([VOCAB_SIZE], f"from 0 to {VOCAB_SIZE - 1}"),
        ([10**30], f"from 0 to {VOCAB_SIZE - 1}"),
    ],
)
def test_bad_token_ids_are_refused_before_anything_is_queued(artifact: Artifact, ids: list[int], message: str) -> None:
    async def test() -> None:
        engine = FakeEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            with pytest.raises(InvalidRequestError, match=message):
                await service.embed_token_ids([[1], ids])
        assert engine.batches == []

    run_async(test)


# Admission


def test_beyond_max_queue_size_requests_are_refused_with_a_time_to_come_back(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, max_queue_size=3, max_client_batch_size=3) as service:
            accepted = asyncio.ensure_future(service.embed_texts(["a", "b"]))
            await entered(engine)
            with pytest.raises(OverloadedError, match="2 inputs are waiting and the limit is 3") as caught:
                await service.embed_texts(["c", "d"])
            assert caught.value.retry_after_s > 0
            fits = asyncio.ensure_future(service.embed_texts(["c"]))
            engine.open()
            assert len((await accepted).vectors) + len((await fits).vectors) == 3

    run_async(test)


async def _admits_a_full_queue(service: InferenceService) -> None:
    """The next request of max_queue_size inputs is answered: nothing of the former ones is still counted."""
    assert len((await service.embed_texts(["a", "b", "c"])).vectors) == 3


def test_admission_is_released_after_success(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS), max_queue_size=3, max_client_batch_size=3) as service:
            for _ in range(5):
                await _admits_a_full_queue(service)

    run_async(test)


def test_admission_is_released_after_an_engine_failure(artifact: Artifact) -> None:
    async def test() -> None:
        engine = PickyEngine(LIMITS, lambda ids: 99 in ids)
        async with running_service(artifact, engine, max_queue_size=3, max_client_batch_size=3) as service:
            for _ in range(5):
                with pytest.raises(EngineError):
                    await service.embed_token_ids([[1], [99], [2]])
            await _admits_a_full_queue(service)

    run_async(test)


def test_admission_is_released_after_a_tokenizer_failure(artifact: Artifact) -> None:
    async def test() -> None:
        settings = {"max_queue_size": 3, "max_client_batch_size": 3, "auto_truncate": False}
        async with running_service(artifact, FakeEngine(LIMITS), **settings) as service:
            for _ in range(5):
                with pytest.raises(InvalidRequestError, match="more than the model's 16 tokens"):
                    await service.embed_texts(["a", "a " * 100, "b"])
            await _admits_a_full_queue(service)

    run_async(test)


def test_admission_is_released_after_cancellation_and_what_was_queued_is_not_run(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, max_queue_size=4, max_client_batch_size=3) as service:
            first = asyncio.ensure_future(service.embed_token_ids([[1]]))
            await entered(engine)
            leaves = asyncio.ensure_future(service.embed_token_ids([[50], [51], [52]]))
            await asyncio.sleep(0)  # one turn of the loop: it is admitted
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            stays = asyncio.ensure_future(service.embed_token_ids([[60], [61], [62]]))
            await asyncio.sleep(0)
            engine.open()
            await asyncio.gather(first, stays)
        assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[60], [61], [62]]]

    run_async(test)


def test_a_row_of_nan_fails_its_request_alone(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, NaNEngine(LIMITS, 99)) as service:
            good, bad = await asyncio.gather(
                service.embed_token_ids([[1]]), service.embed_token_ids([[2], [99]]), return_exceptions=True
            )
        assert isinstance(bad, NonFiniteOutputError)
        assert not isinstance(good, BaseException)

    run_async(test)


# Draining


def test_draining_refuses_new_work_and_answers_what_was_accepted(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            accepted = asyncio.ensure_future(service.embed_texts(["a", "b"]))
            await entered(engine)
            service.begin_drain()
            for refused in (service.embed_texts(["c"]), service.embed_token_ids([[1]])):
                with pytest.raises(ShuttingDownError, match="another replica"):
                    await refused
            drained = asyncio.ensure_future(service.wait_drained())
            await asyncio.sleep(0)
            assert not drained.done()
            engine.open()
            await drained
            assert len((await accepted).vectors) == 2

    run_async(test)


def test_abandoning_answers_everything_that_waits_and_runs_nothing_more(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            waiting = [asyncio.ensure_future(service.embed_token_ids([[1]]))]
            await entered(engine)
            waiting += [asyncio.ensure_future(service.embed_token_ids([[value]])) for value in range(10, 30)]
            await asyncio.sleep(0)
            service.begin_drain()
            service.abandon()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(answer) for answer in answers} == {ShuttingDownError}
            await service.wait_drained()
        assert len(engine.batches) == 1

    run_async(test)


def test_an_idle_service_is_drained_at_once(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            service.begin_drain()
            await service.wait_drained()

    run_async(test)


def test_load_service_verifies_the_artifact_before_it_asks_for_an_engine(artifact: Artifact) -> None:
    async def test() -> None:
        with pytest.raises(ArtifactWrongTargetError, match=r"built for fake.*--target cpu"):
            load_service(artifact.path, ServeConfig(), Metrics())

    run_async(test)
