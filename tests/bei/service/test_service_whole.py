"""Texts that are tokenized to their ends: they keep no urgent text waiting, and count with all of their length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from bei.errors import BeiError
from bei.service.call import ModelRequest, PendingCall
from bei.service.service import InferenceService
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, Input
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.services import run_async, running_service

WHOLE = EncodingOptions(whole=True)
LONG = "cat " * 5000


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


def note_urgency(service: InferenceService, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether what the tokenizers' threads are given is urgent, from now on."""
    found: list[bool] = []
    assert service._readers._texts is not None
    submit = service._readers._texts.submit

    def noted(*args: Any, is_urgent: bool, **options: Any) -> None:
        found.append(is_urgent)
        submit(*args, is_urgent=is_urgent, **options)

    monkeypatch.setattr(service._readers._texts, "submit", noted)
    return found


@pytest.mark.parametrize(
    ("inputs", "is_urgent"), [(["cat"], True), ([LONG], False), (["cat", LONG], False), ([(LONG, "cat")], False)]
)
def test_long_texts_that_are_read_to_their_ends_are_not_urgent(
    inputs: Sequence[Input], is_urgent: bool, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            found = note_urgency(service, monkeypatch)
            with service.admit(inputs, lane="interactive") as ticket:
                await service.encode(ModelRequest(inputs, WHOLE), ticket=ticket)
            assert found == [is_urgent]
            with service.admit(inputs, lane="interactive") as ticket:
                await service.encode(ModelRequest(inputs, AS_CONFIGURED), ticket=ticket)
            assert found == [is_urgent, True]  # of a text that is cut no more is read than fills the model

    run_async(test)


def test_a_text_that_may_have_to_be_read_to_its_end_is_not_urgent_if_that_is_far(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            found = note_urgency(service, monkeypatch)
            for text in (" " * 500_000 + "cat", " " * 600_000 + "cat"):
                with service.admit([text], lane="interactive") as ticket:
                    (encoding,) = await service.encode(ModelRequest([text], AS_CONFIGURED), ticket=ticket)
                assert encoding.num_tokens == 3
            assert found == [True, False]

    run_async(test)


def test_a_long_text_counts_with_all_of_its_length_and_is_bulk_by_it(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            with service.admit([LONG]) as cut, service.admit([LONG], whole=True) as whole:
                assert (cut.lane, cut.admitted.num_tokens) == ("interactive", LIMITS.max_seq_len)
                assert whole.lane == "bulk"
                assert whole.admitted.num_tokens > 5000
            with service.accept([LONG], whole=True) as accepted:
                assert accepted.admitted == whole.admitted
                await service.encode(ModelRequest([LONG], WHOLE), ticket=accepted)
            assert service._admission.num_tokens == 0

    run_async(test)


def test_what_is_tokenized_of_a_request_is_taken_off_its_estimate_with_all_of_its_length(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            with service.admit([LONG, "cat"], whole=True) as ticket, service.admit(["cat"]) as alone:
                await service.encode(ModelRequest([LONG], WHOLE), ticket=ticket)
                assert service._admission.num_tokens == 2 * alone.admitted.num_tokens

    run_async(test)


def test_a_call_that_ends_while_its_long_text_is_tokenized_leaves_the_rest_of_it(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    failed: list[int] = []
    fail_at = InferenceService._fail_at

    def note_failure(service: InferenceService, call: PendingCall, index: int, error: BeiError) -> None:
        failed.append(index)
        fail_at(service, call, index, error)

    monkeypatch.setattr(InferenceService, "_fail_at", note_failure)

    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            encode = service.encoder._tokenizer.encode_batch
            loop, begun = asyncio.get_running_loop(), asyncio.Event()

            class Spy:
                def __getattr__(self, name: str) -> Any:
                    return getattr(tokenizer, name)

                def encode_batch(self, texts: list[str], **options: Any) -> Any:
                    pieces.append(sum(map(len, texts)))
                    loop.call_soon_threadsafe(begun.set)
                    if sum(pieces) > 50_000:
                        while service._calls:  # until the caller has left
                            time.sleep(0.001)
                    return encode(texts, **options)

            tokenizer = service.encoder._tokenizer
            monkeypatch.setattr(service.encoder, "_tokenizer", Spy())
            text = LONG * 20
            with service.admit([text], whole=True) as ticket:
                work = asyncio.ensure_future(service.encode(ModelRequest([text], WHOLE), ticket=ticket))
                await begun.wait()
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
            await loop.run_in_executor(None, service._readers.close)
            assert sum(pieces) < 100_000
            assert not failed

    run_async(test)
