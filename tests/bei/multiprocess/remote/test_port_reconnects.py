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


def test_what_is_cancelled_while_no_process_is_there_neither_stays_nor_waits(place: Place) -> None:
    """Clients that tried again and again while the process was away left all their requests in memory, as waiting."""
    engine = GatedEngine(LIMITS)
    first = serve_port(place, {MODEL: served_model(engine)})
    asker = Asker(place.address)
    before = [asker.submit([value]) for value in (1, 2)]
    engine.wait_entered()
    abandon(first)
    wait_until(lambda: asker.port._channel is None, "it is away")
    meanwhile = [asker.submit([value], [value, value]) for value in range(3, 103)]
    for request in (before[0], *meanwhile[:50], *meanwhile[51:]):
        asker.port.cancel(request)
    assert len(asker.port._unseen) == 2
    assert asker.port.stats().lanes["bulk"][:2] == (3, 1 + 1 + 2)
    second_engine = FakeEngine(LIMITS)
    second = serve_port(place, {MODEL: served_model(second_engine)})
    asker.wait(before[1])
    asker.wait(meanwhile[50], 2)
    wait_until(lambda: not asker.port._unseen, "the next process has seen them")
    assert sum(batch.batch_size for batch in second_engine.batches) == 3
    engine.open(9)
    asker.port.close()
    second.close()


def test_what_is_cancelled_before_its_process_has_seen_it_leaves_the_numbers_of_the_others_right(place: Place) -> None:
    engine = GatedEngine(LIMITS)
    server = serve_port(place, {MODEL: served_model(engine)})
    asker = Asker(place.address)
    running = asker.submit([9])
    engine.wait_entered()
    requests = [asker.submit([value]) for value in range(1, 9)]
    for request in requests[1::2]:
        asker.port.cancel(request)
    with asker.port._lock:
        left = [given.number for given in asker.port._unseen]
    assert left == sorted(left)
    wait_until(lambda: not asker.port._unseen, "they are seen, with gaps between them")
    wait_until(lambda: asker.port.stats().lanes["bulk"].num_sequences == 4, "the others wait")
    engine.open(9)
    for request in (running, *requests[0::2]):
        asker.wait(request)
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
