"""Engines on the other end of a socket, behind one engine's interface: outputs, errors, devices, ends, hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from bei.core import Encoding, Outputs, PackedBatch, SharedTokens
from bei.engine.fake import FakeEngine, fake_row
from bei.errors import BeiError, EngineDeadError, EngineDiedError, EngineError, ModelNotFoundError
from bei.multiprocess.remote import engine_pool
from bei.multiprocess.remote.engine_pool import Devices, RemoteEngines
from bei.multiprocess.remote.engine_server import EngineServer
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from tests.bei.multiprocess.chain import (
    MODEL,
    Asker,
    Place,
    abandon,
    model_info_of,
    nothing_left,
    places,
    serve_engine,
    serve_port,
    served_model,
)
from tests.bei.scheduler.front import LIMITS, wait_until
from tests.support.engines import DEADLINE_S, GatedEngine, PickyEngine, TokenEngine, ids, sequences_of, token_rows


class Machine:
    """Engine processes, one a device, and what a batch manager's process has of them."""

    def __init__(self, *engines: Any, **options: Any) -> None:
        self.engines = engines
        self._places = places(len(engines))
        self.places: Sequence[Place] = self._places.__enter__()
        self.dead: list[None] = []
        self.servers = [self.serve(index, engine) for index, engine in enumerate(engines)]
        self._remotes: list[RemoteEngines] = []
        self.remote = self.connect(**options)

    def serve(self, index: int, engine: Any) -> EngineServer:
        """An engine process starts. One whose engine is dead ends with all its connections, as a process does."""

        is_serving = threading.Event()  # who waits in the backlog may ask for a step before there is a ``server``

        def ends() -> None:
            assert is_serving.wait(DEADLINE_S)
            abandon(server)
            self.dead.append(None)

        server = serve_engine(self.places[index], engine, ends)
        is_serving.set()
        return server

    def connect(self, **options: Any) -> RemoteEngines:
        """A model's engine over all of them."""
        addresses = [place.address for place in self.places]
        self._remotes.append(RemoteEngines(addresses, MODEL, **{"hang_timeout_s": 0.0, **options}))
        return self._remotes[-1]

    def close(self) -> None:
        for engine in self.engines:
            if isinstance(engine, GatedEngine):
                engine.open(20)
        for remote in self._remotes:
            remote.close()
        for server in self.servers:
            server.close()
        self._places.__exit__(None, None, None)


@pytest.fixture
def machine() -> Iterator[Any]:
    made: list[Machine] = []

    def make(*engines: Any, **options: Any) -> Machine:
        made.append(Machine(*engines, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def batch_of(*sequences: Sequence[int]) -> PackedBatch:
    return PackedBatch.from_encodings([Encoding(ids(*values)) for values in sequences])


def later(work: Any) -> Any:
    """Do it in a thread; call the result to wait for it, and get what it gave or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BeiError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(DEADLINE_S)
        return found[0]

    return wait


# Outputs


def test_a_step_with_every_field_is_run_as_it_is(machine: Any) -> None:
    engine = FakeEngine(LIMITS)
    batch = PackedBatch.from_encodings(
        [Encoding(ids(1, 2), ids(0, 1), num_keys=1, num_unpooled=1), Encoding(ids(3, 4, 5))]
    )
    rows = machine(engine).remote.run(batch, {"embedding"})["embedding"]
    assert rows.tolist() == [fake_row(ids(1, 2), ids(0, 1)).tolist(), fake_row(ids(3, 4, 5)).tolist()]
    (ran,) = engine.batches
    for field in ("input_ids", "cu_seqlens", "token_type_ids", "key_lens", "unpooled_lens"):
        np.testing.assert_array_equal(getattr(ran, field), getattr(batch, field))


def test_shared_tokens_of_a_step_arrive(machine: Any) -> None:
    engine = FakeEngine(LIMITS)
    batch = batch_of([1, 2, 3], [1, 2, 4])._replace(shared=SharedTokens(ids(0, 1, 2, 5), ids(0, 1, 2, 0, 1, 3)))
    machine(engine).remote.run(batch, {"embedding"})
    (ran,) = engine.batches
    assert ran.num_computed == 4
    assert ran.shared is not None
    assert batch.shared is not None
    for found, expected in zip(ran.shared, batch.shared, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_outputs_are_those_that_were_asked_for_and_keep_their_shapes(machine: Any) -> None:
    class Choosing(TokenEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            return {name: rows for name, rows in super().run(batch).items() if outputs is None or name in outputs}

    remote = machine(Choosing(LIMITS)).remote
    batch = batch_of([1, 2, 3], [4])
    everything = remote.run(batch)
    assert set(everything) == {"embedding", "token_ids"}
    np.testing.assert_array_equal(
        everything["token_ids"], np.concatenate([token_rows(ids(1, 2, 3)), token_rows(ids(4))])
    )
    assert set(remote.run(batch, {"token_ids"})) == {"token_ids"}


def test_what_an_engine_raises_arrives_with_its_class_and_the_engine_goes_on(machine: Any) -> None:
    engine = PickyEngine(LIMITS, lambda values: 9 in values)
    remote = machine(engine).remote
    with pytest.raises(EngineError, match="RuntimeError: poison"):
        remote.run(batch_of([9]))
    engine._error = EngineError
    with pytest.raises(EngineError, match=r"^poison$"):
        remote.run(batch_of([9]))
    assert remote.run(batch_of([1]))["embedding"].tolist() == [fake_row(ids(1)).tolist()]


@pytest.mark.parametrize("error", [EngineDeadError, SystemExit])
def test_a_dead_engine_is_the_end_of_its_process(machine: Any, error: Any) -> None:
    one = machine(PickyEngine(LIMITS, lambda values: 9 in values, error))
    result = later(lambda: one.remote.run(batch_of([9])))
    wait_until(lambda: len(one.dead) == 1, "the process is to end")
    abandon(one.servers[0])
    assert type(result()) is EngineDiedError


# Devices


def test_the_streams_of_all_devices_are_one_engine_s(machine: Any) -> None:
    engines = [FakeEngine(LIMITS, num_streams=2), FakeEngine(LIMITS, num_streams=2)]
    for index, engine in enumerate(engines):
        engine.info = replace(engine.info, device=f"device {index}", memory_bytes=100)
    one = machine(*engines)
    info = one.remote.info
    assert (info.num_streams, info.device, info.memory_bytes) == (4, "device 0, device 1", 200)
    assert not info.is_replaceable
    assert one.remote.num_ready() == 4
    abandon(one.servers[1])
    wait_until(lambda: one.remote.num_ready() == 2, "one is away")
    one.servers[1] = one.serve(1, engines[1])
    wait_until(lambda: one.remote.num_ready() == 4, "it is back")


def test_devices_run_at_once_and_one_that_is_away_gets_nothing(machine: Any) -> None:
    engines = [GatedEngine(LIMITS), GatedEngine(LIMITS)]
    one = machine(*engines)
    results = [later(lambda value=value: one.remote.run(batch_of([value]))) for value in (1, 2)]
    for engine in engines:
        engine.wait_entered()
    third = later(lambda: one.remote.run(batch_of([3])))
    for engine in engines:
        engine.open()
    for result in (*results, third):
        assert len(result()["embedding"]) == 1
    abandon(one.servers[0])
    wait_until(lambda: one.remote.num_ready() == 1, "it is away")
    count = len(engines[0].batches)
    for value in range(5):
        one.remote.run(batch_of([value]))
    assert len(engines[0].batches) == count


def test_models_that_share_devices_use_all_of_them(machine: Any) -> None:
    engines = [GatedEngine(LIMITS), GatedEngine(LIMITS)]
    devices = Devices()
    one = machine(*engines, devices=devices)
    other = one.connect(devices=devices)
    results = [later(lambda remote=remote: remote.run(batch_of([1]))) for remote in (one.remote, other)]
    for engine in engines:
        engine.wait_entered()  # neither model waits behind the other
        engine.open()
    for result in results:
        assert len(result()["embedding"]) == 1


def test_a_sequence_whose_process_died_runs_alone_on_its_device(machine: Any) -> None:
    """Else another model's step could end the process beside it a second time, and it would be refused."""
    engine = GatedEngine(LIMITS, num_streams=2)
    devices = Devices()
    one = machine(engine, devices=devices)
    other = one.connect(devices=devices)
    died = later(lambda: one.remote.run(batch_of([1])))
    engine.wait_entered()
    abandon(one.servers[0])
    assert type(died()) is EngineDiedError
    engine.let_one_through()  # what has no process any more
    one.servers[0] = one.serve(0, engine)
    wait_until(lambda: one.remote.num_ready() == 2, "the next one is there")

    before = later(lambda: other.run(batch_of([2])))
    engine.wait_entered()
    suspect = later(lambda: one.remote.run(batch_of([1])))
    wait_until(lambda: bool(devices._reserved), "it waits for the step beside it")
    behind = later(lambda: other.run(batch_of([3])))
    assert not engine._entered.acquire(timeout=0.1)
    for result in (before, suspect, behind):  # one after the other
        engine.let_one_through()
        assert len(result()["embedding"]) == 1
    assert [batch.input_ids.tolist() for batch in engine.batches] == [[1], [2], [1], [3]]

    results = [later(lambda value=value: one.remote.run(batch_of([value]))) for value in (1, 2)]
    for _ in results:
        engine.wait_entered()
    engine.open(2)
    for result in results:  # nothing is suspected any longer
        assert len(result()["embedding"]) == 1


def test_sequences_that_are_suspected_at_once_run_one_after_the_other(machine: Any) -> None:
    engine = GatedEngine(LIMITS, num_streams=2)
    one = machine(engine)
    running = [later(lambda value=value: one.remote.run(batch_of([value]))) for value in (1, 2)]
    for _ in running:
        engine.wait_entered()
    abandon(one.servers[0])
    for result in running:
        assert type(result()) is EngineDiedError
    engine.open(2)
    one.servers[0] = one.serve(0, engine)
    wait_until(lambda: one.remote.num_ready() == 2, "the next one is there")
    again = [later(lambda value=value: one.remote.run(batch_of([value]))) for value in (1, 2)]
    for result in again:
        assert len(result()["embedding"]) == 1


def test_two_devices_answer_one_queue_behind_a_gate(machine: Any) -> None:
    engines = [GatedEngine(LIMITS), GatedEngine(LIMITS)]
    one = machine(*engines)
    with places(1) as (place,):
        server = serve_port(place, {MODEL: served_model(one.remote, DeviceGate())})
        asker = Asker(place.address)
        requests: list[int] = []
        for engine in engines:
            requests.append(asker.submit([1 + len(requests)]))
            engine.wait_entered()  # the second step runs beside the first
        for engine in engines:
            engine.open()
        requests += [asker.submit([10 + value]) for value in range(20)]
        for request in requests:
            asker.wait(request)
        assert sum(batch.batch_size for engine in engines for batch in engine.batches) == 22
        asker.port.close()
        server.close()


def test_an_engine_that_is_not_served_is_refused_by_name(machine: Any) -> None:
    one = machine(FakeEngine(LIMITS))
    with pytest.raises(ModelNotFoundError, match="other@1"):
        RemoteEngines([one.places[0].address], "other@1")


def test_engines_come_and_go(machine: Any) -> None:
    one = machine(FakeEngine(LIMITS))
    newer = TokenEngine(LIMITS)
    one.servers[0].add_engine(newer, model_info_of(newer, "tiny@1"))
    remote = RemoteEngines([one.places[0].address], "tiny@1")
    assert set(remote.run(batch_of([1]))) == {"embedding", "token_ids"}
    one.servers[0].retire("tiny@1")
    with pytest.raises(EngineError, match="retired"):
        remote.run(batch_of([1]))
    remote.close()
    assert one.remote.run(batch_of([1]))


def test_whoever_waits_for_the_first_process_does_not_wait_for_ever() -> None:
    with places(1) as (place,), pytest.raises(EngineDiedError):
        RemoteEngines([place.address], MODEL, connect_timeout_s=0.05)


# Processes that end


def test_a_step_whose_process_ends_fails_and_the_next_one_waits_for_the_next_process(machine: Any) -> None:
    gated = GatedEngine(LIMITS)
    one = machine(gated)
    lost = later(lambda: one.remote.run(batch_of([1])))
    gated.wait_entered()
    abandon(one.servers[0])
    assert type(lost()) is EngineDiedError
    waiting = later(lambda: one.remote.run(batch_of([2])))
    one.servers[0] = one.serve(0, FakeEngine(LIMITS))
    assert waiting()["embedding"].tolist() == [fake_row(ids(2)).tolist()]


def test_without_a_process_the_engine_is_dead_in_the_end(machine: Any) -> None:
    one = machine(FakeEngine(LIMITS), patience_s=0.05)
    abandon(one.servers[0])
    wait_until(lambda: one.remote.num_ready() == 0, "it is away")
    with pytest.raises(EngineDeadError, match="restart"):
        one.remote.run(batch_of([1]))


def test_a_manager_without_a_process_is_closed_soon_and_what_waits_fails(machine: Any) -> None:
    one = machine(FakeEngine(LIMITS))
    with places(1) as (place,), mock.patch.object(engine_pool, "_CLOSING_PATIENCE_S", 0.1):
        server = serve_port(place, {MODEL: served_model(one.remote)})
        asker = Asker(place.address)
        abandon(one.servers[0])
        wait_until(lambda: one.remote.num_ready() == 0, "it is away")
        requests = [asker.submit([value]) for value in range(3)]
        wait_until(lambda: len(server._services[MODEL]._asked) == len(requests), "they wait there")
        one.remote.begin_close()
        began_s = time.monotonic()
        server.close()
        assert time.monotonic() - began_s < 5.0  # and not 600
        for request in requests:
            (error,) = asker.wait(request)
            assert type(error) is EngineDeadError
            assert "No engine process has been available for 0 s: ask another replica" in str(error)
        asker.port.close()


def test_the_costs_that_are_given_are_those_of_the_engine(machine: Any) -> None:
    costs = CostModel.assumed(LIMITS)
    costs.follow(0.25)
    one = machine(FakeEngine(LIMITS), costs=costs)
    assert one.remote.costs is costs


def test_rows_outlive_the_process_that_computed_them(machine: Any) -> None:
    one = machine(FakeEngine(LIMITS))
    rows = one.remote.run(batch_of([1, 2], [3]))["embedding"]
    abandon(one.servers[0])
    one.servers[0] = one.serve(0, FakeEngine(LIMITS))
    for value in range(20):
        one.remote.run(batch_of([value]))
    assert rows.tolist() == [fake_row(ids(1, 2)).tolist(), fake_row(ids(3)).tolist()]


def test_a_step_that_hangs_costs_its_process_and_no_step_of_another(machine: Any) -> None:
    engines = [GatedEngine(LIMITS), GatedEngine(LIMITS)]
    killed: list[int] = []
    with mock.patch.object(engine_pool, "_WATCH_EVERY_S", 0.01):
        one = machine(*engines, hang_timeout_s=0.05, kill=killed.append)
        one.remote.costs.follow(1e-9)
        hung = later(lambda: one.remote.run(batch_of([1])))
        engines[0].wait_entered()
        wait_until(lambda: killed == [0], "the process is ended")
        one.remote._hang_timeout_s = 3600.0
        healthy = later(lambda: one.remote.run(batch_of([2])))
        engines[1].wait_entered()
        abandon(one.servers[0])
        assert type(hung()) is EngineDiedError
        engines[1].open()
        assert len(healthy()["embedding"]) == 1
    assert killed == [0]


def test_without_a_way_to_kill_a_process_that_hangs_is_left(machine: Any) -> None:
    gated = GatedEngine(LIMITS)
    with mock.patch.object(engine_pool, "_WATCH_EVERY_S", 0.01):
        one = machine(gated, hang_timeout_s=0.05)
        one.remote.costs.follow(1e-9)
        with pytest.raises(EngineDiedError):
            one.remote.run(batch_of([1]))


def test_waiting_for_a_device_is_not_taken_to_hang(machine: Any) -> None:
    gated = GatedEngine(LIMITS)
    killed: list[int] = []
    with mock.patch.object(engine_pool, "_WATCH_EVERY_S", 0.01):
        one = machine(gated, hang_timeout_s=0.3, kill=killed.append)
        one.remote.costs.follow(1e-9)
        abandon(one.servers[0])
        wait_until(lambda: one.remote.num_ready() == 0, "it is away")
        waiting = later(lambda: one.remote.run(batch_of([1])))
        began_s = time.monotonic()
        wait_until(lambda: time.monotonic() - began_s > 0.4, "it has waited")
        one.servers[0] = one.serve(0, FakeEngine(LIMITS))
        assert len(waiting()["embedding"]) == 1
    assert killed == []


def test_of_a_step_that_ended_a_process_only_the_guilty_sequence_gets_an_error(machine: Any) -> None:
    """The manager runs each alone; the guilty one ends a second process, and not a third."""

    class Deadly(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            answers = super().run(batch)
            if any(66 in values for values in sequences_of(batch)):
                raise EngineDeadError("the device is lost")
            return answers

    gated = GatedEngine(LIMITS)
    one = machine(gated)
    with places(1) as (place,):
        server = serve_port(place, {MODEL: served_model(one.remote)})
        asker = Asker(place.address)
        first = asker.submit([1])
        gated.wait_entered()
        request = asker.submit([2], [66], [3], [4])
        wait_until(lambda: asker.port.stats().lanes["bulk"].num_sequences == 4, "they wait together")
        abandon(one.servers[0])
        while len(one.dead) < 2:
            count = len(one.dead)
            one.servers[0] = one.serve(0, Deadly(LIMITS))
            wait_until(partial(_has_more, one.dead, count), "it has ended a process")
            abandon(one.servers[0])
        one.servers[0] = one.serve(0, Deadly(LIMITS))
        answers = asker.wait(request, 4)
        assert [type(answer) for answer in answers] == [dict, EngineDiedError, dict, dict]
        assert not isinstance(asker.wait(first)[0], BeiError)
        assert len(one.dead) == 2
        asker.port.close()
        server.close()


def _has_more(values: list[None], count: int) -> bool:
    return len(values) > count


def test_nothing_is_left_of_engines_that_were_left() -> None:
    with nothing_left():
        one = Machine(FakeEngine(LIMITS), hang_timeout_s=30.0)
        one.remote.run(batch_of([1]))
        one.close()
        del one
