"""An engine whose steps are noted, alone and behind a batch manager."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from bei.core import Encoding, ImagePatches, Outputs, PackedBatch
from bei.engine.fake import FakeEngine, fake_row
from bei.errors import EngineDeadError, EngineDiedError
from bei.multiprocess.remote.recorded_engine import GUILTY, RecordedEngine, StepRecords, salt_of
from tests.bei.multiprocess.chain import MODEL, Asker, abandon, embeddings, places, serve_port, served_model
from tests.bei.multiprocess.test_step_records import num_ended
from tests.bei.scheduler.front import LIMITS, wait_until
from tests.support.engines import DEADLINE_S, GatedEngine, PickyEngine, ids


def batch_of(*sequences: Sequence[int]) -> PackedBatch:
    return PackedBatch.from_encodings([Encoding(ids(*sequence)) for sequence in sequences])


def images(*digests: bytes) -> PackedBatch:
    """Images of the same size and so of the same token ids, with other pixels."""
    encodings = [
        Encoding(ids(0, 0), image=ImagePatches(np.full((2, 12), digest[0], np.uint8), digest, (1, 2)))
        for digest in digests
    ]
    return PackedBatch.from_encodings(encodings)


def expected(*sequences: Sequence[int]) -> list[list[float]]:
    return [fake_row(ids(*sequence)).tolist() for sequence in sequences]


class Machine:
    """On which one process after the other runs an engine, and ends in the middle of steps."""

    def __init__(self) -> None:
        self.made = StepRecords.create()

    def records(self) -> StepRecords:
        """The next process's."""
        return StepRecords.attach(os.dup(self.made.fileno()))

    def end_in(self, *sequences: Sequence[int]) -> None:
        """A process ends while it runs them in one step."""
        self.records().begin(batch_of(*sequences), salt_of(MODEL))


@pytest.fixture
def machine() -> Iterator[Machine]:
    found = Machine()
    yield found
    found.made.close()


def test_suspects_run_alone_once_and_the_guilty_not_at_all(machine: Machine) -> None:
    machine.end_in([1], [2, 2])
    machine.end_in([2, 2], [3])
    engine = RecordedEngine(FakeEngine(LIMITS), MODEL, machine.records())
    for batch in (batch_of([1], [9]), batch_of([9], [3]), batch_of([2, 2], [9]), batch_of([2, 2])):
        with pytest.raises(EngineDiedError):
            engine.run(batch)
    assert engine.run(batch_of([8], [9]))["embedding"].tolist() == expected([8], [9])
    assert engine.run(batch_of([1]))["embedding"].tolist() == expected([1])
    assert engine.run(batch_of([1], [9]))["embedding"].tolist() == expected([1], [9])  # acquitted
    with pytest.raises(EngineDiedError):
        engine.run(batch_of([3], [9]))
    engine.close()


def test_an_input_that_fails_has_not_ended_the_process(machine: Machine) -> None:
    machine.end_in([1])
    records = machine.records()
    engine = RecordedEngine(PickyEngine(LIMITS, lambda sequence: 1 in sequence), MODEL, records)
    with pytest.raises(RuntimeError, match="poison"):
        engine.run(batch_of([1]))
    assert not records.has_suspects
    assert not machine.records().has_found_steps


def test_images_are_suspected_by_their_pixels(machine: Machine) -> None:
    for _ in range(GUILTY):
        machine.records().begin(images(b"a", b"bb"), salt_of(MODEL))
    engine = RecordedEngine(FakeEngine(LIMITS), MODEL, machine.records())
    for batch in (images(b"a"), images(b"c", b"bb")):
        with pytest.raises(EngineDiedError):
            engine.run(batch)
    engine.run(images(b"c", b"ab", b"b"))
    engine.run(batch_of([0, 0]))


def test_streams_are_noted_apart(machine: Machine) -> None:
    records = machine.records()
    inner = GatedEngine(LIMITS, num_streams=2)
    model = served_model(RecordedEngine(inner, MODEL, records))
    with places(1) as (place,):
        server = serve_port(place, {MODEL: model})
        asker = Asker(place.address)
        first = asker.submit([1], [2])
        inner.wait_entered()
        second = asker.submit([3])
        inner.wait_entered()
        found = machine.records()  # as if the process ended now
        assert num_ended(found, batch_of([1], [2], [3], [4]), MODEL) == [1, 1, 1, 0]
        inner.open(2)
        assert embeddings([*asker.wait(first, 2), *asker.wait(second)]) == expected([1], [2], [3])
        asker.port.close()
        server.close()


def test_nothing_runs_beside_a_suspect_in_its_process(machine: Machine) -> None:
    """Else another model's input could end the process beside it a second time, and it would be refused."""
    machine.end_in([1])
    records = machine.records()
    inner = GatedEngine(LIMITS, num_streams=3)
    one, other = (RecordedEngine(inner, model, records) for model in (MODEL, "other@1"))
    with ThreadPoolExecutor(3) as pool:
        before = pool.submit(other.run, batch_of([2]))
        inner.wait_entered()
        suspect = pool.submit(one.run, batch_of([1]))
        wait_until(lambda: records._is_reserved, "it waits for the step beside it")
        behind = pool.submit(other.run, batch_of([3]))
        assert not inner._entered.acquire(timeout=0.1)
        for result in (before, suspect, behind):  # one after the other
            inner.let_one_through()
            assert len(result.result(DEADLINE_S)["embedding"]) == 1
    assert [batch.input_ids.tolist() for batch in inner.batches] == [[2], [1], [3]]


def test_behind_a_batch_manager_only_the_guilty_are_refused(machine: Machine) -> None:
    machine.end_in([1], [2], [3])
    machine.end_in([3])
    with places(1) as (place,):
        server = serve_port(place, {MODEL: served_model(RecordedEngine(FakeEngine(LIMITS), MODEL, machine.records()))})
        asker = Asker(place.address)
        answers = asker.wait(asker.submit([1], [2], [3], [4]), 4)
        assert [type(answer) for answer in answers] == [dict, dict, EngineDiedError, dict]
        assert embeddings(answers) == expected([1], [2], [4])
        assert "do not send it again" in str(answers[2])
        asker.port.close()
        server.close()


@pytest.mark.parametrize("error", [EngineDeadError("The device is gone."), SystemExit(1)])
def test_an_engine_that_is_dead_ends_the_process_with_its_step_noted(machine: Machine, error: BaseException) -> None:
    ends: list[bool] = []

    class Dead(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            raise error

    engine = RecordedEngine(
        Dead(LIMITS), MODEL, machine.records(), lambda: ends.append(machine.records().has_found_steps)
    )
    with pytest.raises(type(error)):
        engine.run(batch_of([1]))
    assert ends == [True]


def test_what_waits_is_given_to_any_number_of_processes_that_end_for_reasons_that_are_known() -> None:
    engines = [GatedEngine(LIMITS) for _ in range(5)]
    with places(1) as (place,):
        server = serve_port(place, {MODEL: served_model(engines[0])}, has_culprits=True)
        asker = Asker(place.address)
        request = asker.submit([5])
        for former, engine in pairwise(engines):
            former.wait_entered()
            abandon(server)
            server = serve_port(place, {MODEL: served_model(engine)}, has_culprits=True)
        engines[-1].wait_entered()
        for engine in engines:
            engine.open(9)
        (answer,) = asker.wait(request)
        assert isinstance(answer, dict)
        assert np.array_equal(answer["embedding"], fake_row(ids(5)))
        asker.port.close()
        server.close()
