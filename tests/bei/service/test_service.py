"""InferenceService over fake engines: rows in order, admission, draining."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.artifact import store
from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.core import Float32Array
from bei.engine.fake import FakeEngine, fake_row
from bei.errors import (
    ArtifactWrongTargetError,
    EngineError,
    InvalidRequestError,
    NonFiniteOutputError,
    OverloadedError,
    ShuttingDownError,
)
from bei.metrics.registry import Metrics
from bei.port import UNIT_EMBEDDING
from bei.scheduler.device_gate import DeviceGate
from bei.service import loader
from bei.service.call import InferenceResult, ModelRequest
from bei.service.loader import load_service
from bei.service.service import InferenceService
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.pool import CHUNK
from tests.support.artifacts import LIMITS, VOCAB_SIZE, expected_vectors, save_artifact, tiny_tokenizer, token_ids
from tests.support.engines import GatedEngine, NaNEngine, PickyEngine, TokenEngine, sequences_of, token_rows
from tests.support.services import encode, entered, infer, run_async, running_service


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


def rows_of(answer: InferenceResult) -> Float32Array:
    """The embeddings as the engine gave them."""
    return np.stack([row["embedding"] for row in answer.rows])


def fake_rows(inputs: Sequence[Sequence[int]]) -> Float32Array:
    return np.stack([fake_row(np.array(ids, np.int32)) for ids in inputs])


def test_a_part_of_a_request_is_counted_for_itself_alone(artifact: Artifact) -> None:
    """What waits of the other parts stays counted, also beside a text that is so short that it is tokenized at once."""

    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            other = "cat " * 8
            with service.admit(["cat", other], lane="interactive") as ticket, service.admit([other]) as alone:
                await service.infer(ModelRequest(["cat"]), ticket=ticket, outputs={"embedding"})
                assert service._admission.num_tokens == 2 * alone.admitted.num_tokens

    run_async(test)


def test_texts_are_run_in_order_with_their_token_count(artifact: Artifact) -> None:
    async def test() -> None:
        texts = [f"cat {index % 10} " * (1 + index % 5) for index in range(100)]
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await infer(service, texts)
        ids = [token_ids(text) for text in texts]
        np.testing.assert_array_equal(rows_of(answer), fake_rows(ids))
        assert [encoding.input_ids.tolist() for encoding in answer.encodings] == ids
        assert sum(answer.lengths) == sum(map(len, ids))
        assert answer.truncated == []

    run_async(test)


def test_rows_have_the_outputs_that_were_asked_for_and_no_others(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, TokenEngine(LIMITS)) as service:
            for outputs in ({"embedding"}, {UNIT_EMBEDDING}, {"token_ids"}, {"embedding", UNIT_EMBEDDING}):
                answer = await infer(service, ["cat", "the cat"], outputs=outputs)
                assert [set(row) for row in answer.rows] == [outputs] * 2

    run_async(test)


def test_the_embedding_comes_at_unit_length_too(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await infer(service, ["cat", "the cat"], outputs={UNIT_EMBEDDING})
        np.testing.assert_array_equal(
            np.stack([row[UNIT_EMBEDDING] for row in answer.rows]),
            expected_vectors([token_ids("cat"), token_ids("the cat")]),
        )

    run_async(test)


def test_pairs_and_texts_may_share_a_request_and_token_types_reach_the_engine(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await infer(service, ["cat", ("cat", "the cat")])
        pair = tiny_tokenizer().encode("cat", "the cat")
        text = fake_row(np.array(token_ids("cat"), np.int32))
        both = fake_row(np.array(pair.ids, np.int32), np.array(pair.type_ids, np.int32))
        np.testing.assert_array_equal(rows_of(answer), [text, both])

    run_async(test)


def test_token_ids_are_run_exactly_as_given(artifact: Artifact) -> None:
    async def test() -> None:
        inputs = [[5], [2, 7, 3], [VOCAB_SIZE - 1] * LIMITS.max_seq_len]
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await infer(service, inputs)
        np.testing.assert_array_equal(rows_of(answer), fake_rows(inputs))
        assert sum(answer.lengths) == 4 + LIMITS.max_seq_len

    run_async(test)


def test_truncated_inputs_are_reported_by_position(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await infer(service, ["a", "a " * 100, "b", "b " * 15])
        assert answer.truncated == [1, 3]
        assert sum(answer.lengths) == 3 + 16 + 3 + 16

    run_async(test)


def test_outputs_per_token_are_cut_to_the_tokens_of_each_input(artifact: Artifact) -> None:
    async def test() -> None:
        texts = [f"the cat {'s' * (1 + index % 9)}" for index in range(40)]
        async with running_service(artifact, TokenEngine(LIMITS)) as service:
            answer = await infer(service, texts, outputs={"embedding", "token_ids"})
        for text, row in zip(texts, answer.rows, strict=True):
            ids = np.array(token_ids(text), np.int32)
            np.testing.assert_array_equal(row["token_ids"], token_rows(ids))
            np.testing.assert_array_equal(row["embedding"], fake_row(ids))

    run_async(test)


def test_options_reach_the_tokenizer(artifact: Artifact) -> None:
    async def test() -> None:
        options = EncodingOptions(direction="left", max_tokens=4, with_spans=True)
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            answer = await infer(service, ["a b c d"], options)
        assert answer.encodings[0].input_ids.tolist() == [*token_ids("c d")]
        assert answer.encodings[0].spans is not None
        assert answer.truncated == [0]

    run_async(test)


# Tokenizing only


def test_encoding_alone_answers_in_order_and_runs_nothing(artifact: Artifact) -> None:
    async def test() -> None:
        engine = FakeEngine(LIMITS)
        texts = [f"cat {index % 10} " * (1 + index % 5) for index in range(3 * CHUNK + 1)]
        async with running_service(artifact, engine, tokenizer_threads=3) as service:
            encodings = await encode(service, texts)
        assert [encoding.input_ids.tolist() for encoding in encodings] == [token_ids(text) for text in texts]
        assert engine.batches == []

    run_async(test)


def test_encoding_alone_says_what_is_wrong_with_an_input(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            with pytest.raises(InvalidRequestError, match="more than the model's 16 tokens"):
                await encode(service, ["a", "a " * 100, *["b"] * 100], EncodingOptions(truncate=False))
            assert len(await encode(service, ["a"])) == 1

    run_async(test)


def test_encoding_alone_is_admitted_counted_and_drained_like_other_work(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS), max_queue_tokens=8) as service:
            with service.admit(["a", "b"]) as ticket:
                with pytest.raises(OverloadedError, match="6 tokens are waiting and the limit is 8"):
                    await encode(service, ["c", "d"])
                service.begin_drain()
                with pytest.raises(ShuttingDownError):
                    await encode(service, ["c"])
                drained = asyncio.ensure_future(service.wait_drained())
                assert len(await service.encode(ModelRequest(["a", "b"]), ticket=ticket)) == 2
                assert not drained.done()
            await drained

    run_async(test)


def test_encoding_that_is_cancelled_or_abandoned_ends_at_once(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            leaves, waits = (asyncio.ensure_future(encode(service, ["a"] * 1000)) for _ in range(2))
            await asyncio.sleep(0)
            leaves.cancel()
            service.abandon()
            answers = await asyncio.gather(leaves, waits, return_exceptions=True)
            assert [type(answer) for answer in answers] == [asyncio.CancelledError, ShuttingDownError]
            await service.wait_drained()

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
                await infer(service, [[1], ids])
        assert engine.batches == []

    run_async(test)


# Admission


def test_beyond_max_queue_tokens_requests_are_refused_with_a_time_to_come_back(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, max_queue_tokens=9) as service:
            accepted = asyncio.ensure_future(infer(service, ["a", "b"]))
            await entered(engine)
            with pytest.raises(OverloadedError, match="6 tokens are waiting and the limit is 9: retry in") as caught:
                await infer(service, ["c", "d"], flow=1)
            assert caught.value.retry_after_s > 0
            fits = asyncio.ensure_future(infer(service, ["c"], flow=1))
            engine.open()
            assert len((await accepted).rows) + len((await fits).rows) == 3

    run_async(test)


def test_callers_in_the_process_are_never_refused_but_while_the_service_drains(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, max_queue_tokens=9) as service:
            given = [["a", "b"], ["c", "d"], [f"cat {index}" for index in range(9)]]
            tickets = [service.accept(inputs) for inputs in given]
            assert [ticket.lane for ticket in tickets] == ["interactive", "interactive", "bulk"]
            calls = [
                asyncio.ensure_future(service.infer(ModelRequest(inputs), ticket=ticket, outputs={"embedding"}))
                for inputs, ticket in zip(given, tickets, strict=True)
            ]
            await entered(engine)
            service.begin_drain()
            with pytest.raises(ShuttingDownError):
                service.accept(["a"])
            engine.open()
            assert [len(answer.rows) for answer in await asyncio.gather(*calls)] == [2, 2, 9]
            for ticket in tickets:
                ticket.close()
            await service.wait_drained()

    run_async(test)


def test_a_request_larger_than_the_whole_queue_is_refused_for_good(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS), max_queue_tokens=9) as service:
            with pytest.raises(InvalidRequestError, match="about 12 tokens, the limit is 9: split it"):
                await infer(service, ["a"] * 4)

    run_async(test)


async def _admits_a_full_queue(service: InferenceService) -> None:
    """The next request that fills the queue is answered: nothing of the former ones is still counted."""
    assert len((await infer(service, ["a", "b", "c"])).rows) == 3


def test_admission_is_released_after_success(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS), max_queue_tokens=9) as service:
            for _ in range(5):
                await _admits_a_full_queue(service)

    run_async(test)


def test_admission_is_released_after_an_engine_failure(artifact: Artifact) -> None:
    async def test() -> None:
        engine = PickyEngine(LIMITS, lambda ids: 99 in ids)
        async with running_service(artifact, engine, max_queue_tokens=9) as service:
            for _ in range(5):
                with pytest.raises(EngineError):
                    await infer(service, [[1], [99], [2]])
            await _admits_a_full_queue(service)

    run_async(test)


def test_admission_is_released_after_a_tokenizer_failure(artifact: Artifact) -> None:
    async def test() -> None:
        settings = {"max_queue_tokens": 40, "auto_truncate": False}
        async with running_service(artifact, FakeEngine(LIMITS), **settings) as service:
            for _ in range(5):
                with pytest.raises(InvalidRequestError, match="more than the model's 16 tokens"):
                    await infer(service, ["a", "a " * 100, "b"])
            await _admits_a_full_queue(service)

    run_async(test)


def test_admission_is_released_after_cancellation_and_what_was_queued_is_not_run(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, max_queue_tokens=7) as service:
            first = asyncio.ensure_future(infer(service, [[1]]))
            await entered(engine)
            leaves = asyncio.ensure_future(infer(service, [[50], [51], [52]], flow=1))
            await asyncio.sleep(0)  # one turn of the loop: it is admitted
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            stays = asyncio.ensure_future(infer(service, [[60], [61], [62]], flow=1))
            await asyncio.sleep(0)
            engine.open()
            await asyncio.gather(first, stays)
        assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[60], [61], [62]]]

    run_async(test)


def test_a_row_of_nan_fails_its_request_alone(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, NaNEngine(LIMITS, 99)) as service:
            good, bad = await asyncio.gather(infer(service, [[1]]), infer(service, [[2], [99]]), return_exceptions=True)
        assert isinstance(bad, NonFiniteOutputError)
        assert not isinstance(good, BaseException)

    run_async(test)


# Draining


def test_draining_refuses_new_work_and_answers_what_was_accepted(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            accepted = asyncio.ensure_future(infer(service, ["a", "b"]))
            await entered(engine)
            service.begin_drain()
            for refused in (infer(service, ["c"]), infer(service, [[1]])):
                with pytest.raises(ShuttingDownError, match="another replica"):
                    await refused
            drained = asyncio.ensure_future(service.wait_drained())
            await asyncio.sleep(0)
            assert not drained.done()
            engine.open()
            await drained
            assert len((await accepted).rows) == 2

    run_async(test)


def test_abandoning_answers_everything_that_waits_and_runs_nothing_more(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            waiting = [asyncio.ensure_future(infer(service, [[1]]))]
            await entered(engine)
            waiting += [asyncio.ensure_future(infer(service, [[value]])) for value in range(10, 30)]
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
            load_service(artifact.path, ServeConfig(), Metrics(), DeviceGate())

    run_async(test)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_engine_that_can_be_is_replaced_where_it_hangs(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's cannot: a new one would have the CUDA context of the kernel that does not end."""
    made = [FakeEngine(LIMITS, num_streams=3)]
    made[0].info = replace(made[0].info, is_replaceable=is_replaced)
    asked: list[int | None] = []
    given: list[Any] = []
    monkeypatch.setattr(loader, "engine_for", lambda artifact, config, loaded: made[0])
    monkeypatch.setattr(loader, "load_engine", lambda folder, manifest, options: made[-1])
    monkeypatch.setattr(loader, "given_options", lambda threads, streams: asked.append(streams))
    monkeypatch.setattr(loader, "verified", lambda artifact, engine: artifact)
    monkeypatch.setattr(loader, "local_port", lambda *arguments: given.append(arguments[-1]))
    monkeypatch.setattr(loader, "InferenceService", lambda *arguments, **named: None)
    monkeypatch.setattr(loader, "costs_for", lambda artifact, engine, config: None)
    artifact = save_artifact(tmp_path / "artifact")
    monkeypatch.setattr(store, "load", lambda path, *, sealed: artifact)
    load_service(artifact.path, ServeConfig(tokenizer_threads=1), Metrics(), DeviceGate())
    (reload,) = given
    assert (reload is not None) == is_replaced
    if is_replaced:
        hung = weakref.ref(made.pop())
        assert hung() is None  # nothing keeps its memory for the sake of the next one
        made.append(FakeEngine(LIMITS))
        assert (reload(), asked) == (made[0], [3])
