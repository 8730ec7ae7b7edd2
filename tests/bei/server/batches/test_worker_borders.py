"""What the worker meets in a round or in one batch ends neither it nor another batch, and does not hold the drain."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from bei.server.batches import batch_run, worker
from bei.server.batches.batch_run import BatchRun
from bei.server.batches.records import BatchRecord, FileRecord
from bei.server.batches.store import BatchStore
from tests.bei.server.batches.conftest import MakeClients
from tests.bei.server.batches.served import Clients, execute, lines


def drain(clients: Clients) -> None:
    """Fails where it raises or takes too long."""
    assert clients.app.batches is not None
    clients.app.batches.begin_drain()
    clients.app.run(clients.app.batches.wait_drained())


@pytest.mark.parametrize("record", [b"{}", b"garbage", b"\xff", b'{"id": 1}'], ids=["empty", "garbage", "utf8", "type"])
def test_a_record_that_cannot_be_read_fails_its_batch_and_the_others_go_on(
    record: bytes, serve: MakeClients, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the worker: all other batches stayed in their states, and the drain raised."""
    clients, folder = serve(), tmp_path / "batches"
    file = clients.upload(lines(3)).json()["id"]
    execute(
        folder,
        "INSERT INTO batches (id, owner, input_id, is_open, finished_s, record) VALUES ('batch_x', '', ?, 1, 0, ?)",
        *(file, record),
    )
    assert clients.ended(clients.create(lines(3)).json()["id"])["status"] == "completed"
    failed = clients.batch("batch_x")
    assert (failed["status"], failed["input_file_id"]) == ("failed", file)
    assert "create it again" in failed["errors"]["data"][0]["message"]
    assert clients.ask("DELETE", f"/v1/files/{file}").json()["deleted"]
    assert caplog.text.count("batch_x") == 1
    drain(clients)


def test_the_answers_of_a_batch_that_cannot_be_read_do_not_count_any_more(serve: MakeClients, tmp_path: Path) -> None:
    clients, folder = serve(), tmp_path / "batches"
    drain(clients)
    batch = clients.create(lines(3)).json()["id"]
    assert clients.app.batches is not None
    store = clients.app.batches._store
    store.begin_answers(store.batch("", batch))
    with store._transaction() as run:
        store._insert_file(run, FileRecord("file-o", "", "batch_output", "batch_o_output.jsonl", 0, 0, 2**40))
    execute(folder, "UPDATE batches SET record = 'x' WHERE id = ?", batch)
    assert store.open_batches() == []
    with store._transaction() as run:
        assert run("SELECT id FROM files WHERE NOT is_ready") == [("file-o",)]


@pytest.mark.parametrize("error", [sqlite3.DatabaseError("disk image is malformed"), KeyError("a bug")], ids=str)
def test_a_round_that_fails_is_logged_once_and_tried_again(
    error: Exception, serve: MakeClients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_RETRY_S", 0.01)
    open_batches, failures = BatchStore.open_batches, [5]

    def fails(self: BatchStore) -> list[BatchRecord]:
        if failures[0]:
            failures[0] -= 1
            with self._transaction():
                raise error
        return open_batches(self)

    monkeypatch.setattr(BatchStore, "open_batches", fails)
    clients = serve()
    assert clients.ended(clients.create(lines(3)).json()["id"])["status"] == "completed"
    assert (failures, caplog.text.count("batches wait")) == ([0], 1)
    drain(clients)


def test_a_database_that_is_overwritten_holds_no_drain(
    serve: MakeClients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_RETRY_S", 0.01)
    clients, file = serve(), tmp_path / "batches" / "batches.sqlite3"
    clients.ended(clients.create(lines(3)).json()["id"])
    content = bytearray(file.read_bytes())
    content[24:28] = b"\0\0\xff\xff"  # it was changed
    content[4096:] = b"\xff" * (len(content) - 4096)
    file.write_bytes(content)

    async def seen() -> None:
        while "malformed" not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)

    clients.app.run(seen())
    drain(clients)


def test_a_run_that_raises_is_logged_and_tried_again_beside_the_others(
    serve: MakeClients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_RETRY_S", 0.01)
    fail, failures = BatchRun._fail, [2]

    async def raises(self: BatchRun, problem: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise KeyError("a bug")
        await fail(self, problem)

    monkeypatch.setattr(batch_run.BatchRun, "_fail", raises)
    monkeypatch.setattr(batch_run, "validated", lambda path, *_: 1 // 0)
    clients = serve(keys=True)
    first = clients.create(lines(3), "one").json()["id"]
    assert clients.ended(first, "one")["status"] == "failed"
    assert caplog.text.count(f"batch {first} meets an unexpected error, and is tried again") == 2
    assert clients.ended(clients.create(lines(3), "other").json()["id"], "other")["status"] == "failed"
    drain(clients)
