"""A batch manager's process ends: what is unanswered goes to the next one, and each item is answered once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bei.engine.fake import FakeEngine, fake_row
from bei.errors import (
    BeiError,
    EngineDeadError,
    EngineError,
)
from bei.multiprocess.remote import engine_port_client
from tests.bei.multiprocess.chain import (
    MODEL,
    Asker,
    Place,
    abandon,
    embeddings,
    serve_port,
    served_model,
)
from tests.bei.scheduler.front import LIMITS, wait_until
from tests.support.engines import GatedEngine, ids


def test_what_is_unanswered_is_submitted_to_the_next_process_and_answered_once(place: Place) -> None:
    engine = GatedEngine(LIMITS)
    first = serve_port(place, {MODEL: served_model(engine)})
    asker = Asker(place.address)
    request = asker.submit(*([value, value] for value in range(6)))
    engine.wait_entered()
    engine.let_one_through()
    engine.wait_entered()
    wait_until(lambda: asker.num_answers == 4, "one step is answered")
    abandon(first)
    wait_until(lambda: asker.port.stats().is_stalled, "it is away")
    assert asker.port.stats().is_alive
    assert asker.port.stats().lanes["bulk"][:2] == (2, 4)
    meanwhile = asker.submit([50])
    second_engine = FakeEngine(LIMITS)
    second = serve_port(place, {MODEL: served_model(second_engine)})
    rows = asker.wait(request, 6)
    assert embeddings(rows) == [fake_row(ids(value, value)).tolist() for value in range(6)]
    asker.wait(meanwhile)
    assert not asker.port.stats().is_stalled
    assert sum(batch.batch_size for batch in second_engine.batches) == 3
    engine.open(9)
    asker.port.close()
    second.close()
    assert asker.num_answers == 7


def test_an_item_that_three_processes_were_given_gets_an_error_and_no_fourth(place: Place) -> None:
    engines = [GatedEngine(LIMITS) for _ in range(3)]
    server = serve_port(place, {MODEL: served_model(engines[0])})
    asker = Asker(place.address)
    poison = asker.submit([66])
    for former, engine in pairwise(engines):
        former.wait_entered()
        abandon(server)
        server = serve_port(place, {MODEL: served_model(engine)})
    engines[-1].wait_entered()
    fresh = asker.submit([1])
    wait_until(lambda: asker.port.stats().lanes["bulk"].num_sequences == 1, "it waits")
    abandon(server)
    last = FakeEngine(LIMITS)
    server = serve_port(place, {MODEL: served_model(last)})
    (error,) = asker.wait(poison)
    assert type(error) is EngineError
    assert "3 processes" in str(error)
    (row,) = asker.wait(fresh)
    assert not isinstance(row, BeiError)
    assert [batch.input_ids.tolist() for batch in last.batches] == [[1]]
    for engine in engines:
        engine.open(9)
    asker.port.close()
    server.close()


def test_rows_of_a_process_that_has_ended_stay_as_they_are(place: Place) -> None:
    first = serve_port(place, {MODEL: served_model(FakeEngine(LIMITS))})
    asker = Asker(place.address)
    (row,) = asker.rows([1, 2, 3])
    abandon(first)
    second = serve_port(place, {MODEL: served_model(FakeEngine(LIMITS))})
    asker.rows([4])
    assert row["embedding"].tolist() == fake_row(ids(1, 2, 3)).tolist()
    asker.port.close()
    second.close()


def test_without_a_process_what_waits_is_given_up_in_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_port_client, "_PATIENCE_S", 0.05)
    engine = GatedEngine(LIMITS)
    server = serve_port(place, {MODEL: served_model(engine)})
    asker = Asker(place.address)
    request = asker.submit([1])
    engine.wait_entered()
    abandon(server)
    (error,) = asker.wait(request)
    assert type(error) is EngineDeadError
    with pytest.raises(EngineDeadError):
        asker.submit([2])
    assert not asker.port.stats().is_alive
    engine.open(9)
    asker.port.close()
