"""Batches from upload to their last state, over engines that a test holds: and what may go wrong on the way."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from bei.engine.fake import FakeEngine
from bei.server.auth.rate_limit import Bucket
from bei.server.batches import answer_files, batch_run, runner
from bei.server.batches import store as batch_store
from bei.server.batches.records import BatchRecord, FileRecord, file_object
from bei.server.batches.store import BatchStore, OwnerLimits, Page
from bei.utils.file_lock import FileLock, acquire, try_acquire
from tests.bei.server.batches.conftest import MakeClients
from tests.bei.server.batches.served import ENDED, line, lines
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine, PickyEngine


def counts(batch: dict[str, Any]) -> tuple[int, int, int]:
    found = batch["request_counts"]
    return found["total"], found["completed"], found["failed"]


def test_a_batch_goes_through_its_states_and_is_answered_in_order(serve: MakeClients) -> None:
    clients = serve()
    batch = clients.create(lines(25), metadata={"a": "b"}).json()
    assert (batch["status"], batch["output_file_id"], batch["metadata"]) == ("validating", None, {"a": "b"})
    done = clients.ended(batch["id"])
    assert (done["status"], counts(done)) == ("completed", (25, 22, 3))
    times = [done[f"{state}_at"] for state in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times)
    assert [one["custom_id"] for one in clients.content(done["output_file_id"])] == [
        f"c{n}" for n in range(25) if n % 10
    ]
    assert [one["response"]["status_code"] for one in clients.content(done["error_file_id"])] == [400] * 3
    file = clients.ask("GET", f"/v1/files/{done['output_file_id']}").json()
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")


def test_files_without_lines_are_not_there(serve: MakeClients, tmp_path: Path) -> None:
    clients = serve()
    done = clients.ended(clients.create(line("a")).json()["id"])
    assert (done["error_file_id"], counts(done)) == (None, (1, 1, 0))
    assert {path.name for path in (tmp_path / "batches" / "files").iterdir()} == {
        done["input_file_id"],
        done["output_file_id"],
    }


def test_an_engine_that_fails_on_a_line_costs_that_line_its_answer(serve: MakeClients) -> None:
    clients = serve(PickyEngine(LIMITS, lambda ids: 11 in ids))  # "the"
    done = clients.ended(clients.create(line("a") + line("b", "the") + line("c")).json()["id"])
    assert [one["custom_id"] for one in clients.content(done["output_file_id"])] == ["a", "c"]
    (error,) = clients.content(done["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("b", 500)


def test_a_batch_that_is_cancelled_ends_what_is_under_way(serve: MakeClients) -> None:
    engine = GatedEngine(LIMITS)
    clients = serve(engine)
    batch = clients.create(lines(2_000)).json()
    clients.ended(batch["id"], until=("in_progress",))
    while not engine.batches:
        clients.ask("GET", f"/v1/batches/{batch['id']}")  # the server is at work while it is asked
    assert clients.ask("POST", f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    assert clients.ask("POST", f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    engine.open()
    done = clients.ended(batch["id"])
    assert (done["status"], done["request_counts"]["total"]) == ("cancelled", 2_000)
    assert 0 < done["request_counts"]["completed"] < 1_800
    assert sorted(clients.ids(done)) == sorted(f"c{n}" for n in range(2_000))
    assert clients.content(done["error_file_id"])[-1]["error"]["code"] == "batch_cancelled"
    refused = clients.ask("POST", f"/v1/batches/{batch['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")


def test_a_batch_whose_time_is_over_has_an_error_for_what_is_left(serve: MakeClients) -> None:
    engine = GatedEngine(LIMITS)
    clients = serve(engine)
    batch = clients.create(lines(400), completion_window="2s").json()
    clients.ended(batch["id"], until=("in_progress", *ENDED))  # on a slow machine the time may be over before

    clients.app.run(asyncio.sleep(2.1))
    engine.open()
    done = clients.ended(batch["id"])
    assert done["status"] == "expired"
    assert sorted(clients.ids(done)) == sorted(f"c{n}" for n in range(400))
    assert clients.content(done["error_file_id"])[-1]["error"]["code"] == "batch_expired"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", [("empty_file", None)]),
        (b"\n\n", [("empty_file", None)]),
        (line("a") + b"garbage\n" + line("b", url="/embed"), [("invalid_json_line", 2), ("mismatched_endpoint", 3)]),
        (line("a") + line("b") + line("a") + line("a"), [("duplicate_custom_id", 3), ("duplicate_custom_id", 4)]),
        (b"garbage\n" * 100, [("invalid_json_line", n) for n in range(1, 21)]),
        (b"".join(line(f"c{n}") for n in range(101)), [("too_many_lines", None)]),
    ],
)
def test_a_wrong_input_is_not_run_and_says_why(
    serve: MakeClients, content: bytes, found: list[tuple[str, int | None]]
) -> None:
    engine = FakeEngine(LIMITS)
    clients = serve(engine, batch_line_limit=100)
    num_before = len(engine.batches)
    failed = clients.ended(clients.create(content).json()["id"])
    assert failed["status"] == "failed"
    assert [(one["code"], one["line"]) for one in failed["errors"]["data"]] == found
    assert (failed["output_file_id"], failed["error_file_id"], len(engine.batches)) == (None, None, num_before)


def test_a_full_disk_is_a_failed_batch_and_the_server_goes_on(
    serve: MakeClients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = serve()
    written = answer_files.write_all
    is_full = [True]

    def write(file: Any, content: bytes) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(file, content)

    monkeypatch.setattr(answer_files, "write_all", write)
    failed = clients.ended(clients.create(lines(20)).json()["id"])
    assert failed["status"] == "failed"
    (problem,) = failed["errors"]["data"]
    assert (problem["code"], "is full" in problem["message"]) == ("disk_full", True)
    assert {path.name for path in (tmp_path / "batches" / "files").iterdir()} == {failed["input_file_id"]}
    is_full[0] = False
    assert clients.ended(clients.create(lines(20)).json()["id"])["status"] == "completed"


def test_that_a_batch_has_failed_is_kept_once_there_is_room(
    serve: MakeClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "_RETRY_S", 0.02)
    clients = serve()
    finish, refusals = BatchStore.finish, [3]

    def refuse(self: BatchStore, *given: Any) -> BatchRecord:
        if refusals[0]:
            refusals[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return finish(self, *given)

    monkeypatch.setattr(BatchStore, "finish", refuse)
    failed = clients.ended(clients.create(b"garbage\n").json()["id"])
    assert (failed["status"], refusals) == ("failed", [0])


def test_answers_beyond_the_bytes_of_a_key_fail_its_batch(serve: MakeClients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_files, "_CHECKPOINT_S", 0.0)
    content = lines(50)
    clients = serve(batch_disk_limit=len(content) + 2_000, batch_file_limit=len(content) + 1_000)
    failed = clients.ended(clients.create(content).json()["id"])
    assert [one["code"] for one in failed["errors"]["data"]] == ["quota_exceeded"]
    assert clients.ask("GET", "/v1/files").json()["data"][0]["id"] == failed["input_file_id"]


def test_batches_of_two_keys_run_side_by_side_and_those_of_one_in_their_order(serve: MakeClients) -> None:
    engine = GatedEngine(LIMITS)
    clients = serve(engine, keys=True)
    first, second = clients.create(lines(5), "one").json(), clients.create(lines(5), "one").json()
    theirs = clients.create(lines(5), "other").json()
    clients.ended(first["id"], "one", ("in_progress",))
    clients.ended(theirs["id"], "other", ("in_progress",))
    assert clients.batch(second["id"], "one")["status"] == "validating"
    engine.open()
    for batch, key in ((first, "one"), (second, "one"), (theirs, "other")):
        assert clients.ended(batch["id"], key)["status"] == "completed"


def test_a_key_that_is_taken_away_ends_its_batches(serve: MakeClients) -> None:
    engine = GatedEngine(LIMITS)
    clients = serve(engine, keys=True)
    batch = clients.create(lines(2_000), "one").json()
    clients.ended(batch["id"], "one", ("in_progress",))
    keys = clients.app.keys
    assert keys is not None
    key = keys._by_name.pop("one")
    engine.open()
    for _ in range(3):
        engine.open()
    failed = clients.ended(batch["id"], "one")
    assert [one["code"] for one in failed["errors"]["data"]] == ["unauthorized"]
    assert key.name == "one"


def test_a_rate_of_a_key_holds_for_its_batch_which_comes_back(
    serve: MakeClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_APART_S", 0.0)
    clients = serve(keys=True)
    assert clients.app.keys is not None
    key = clients.app.keys.named("one")
    assert key is not None
    key._requests = Bucket(20.0)  # of which the upload and the creation take two
    batch = clients.create(lines(30), "one").json()

    async def wait() -> BatchRecord:
        assert clients.app.batches is not None
        while True:
            found: BatchRecord = clients.app.batches._store.batch("one", batch["id"])
            if not found.is_open:
                return found
            await asyncio.sleep(0.01)

    done: BatchRecord = clients.app.run(wait())
    assert (done.status, done.checkpoint.completed) == ("completed", 27)


def test_one_process_runs_batches_and_the_next_goes_on_when_it_ends(serve: MakeClients, tmp_path: Path) -> None:
    first, second = serve(), serve()
    batch = first.create(lines(20)).json()
    assert second.batch(batch["id"])["id"] == batch["id"]
    assert first.ended(batch["id"])["status"] == "completed"
    waiting = second.create(lines(5)).json()
    second.ended(waiting["id"], until=("validating",))
    assert first.app.batches is not None
    first.app.batches.begin_drain()
    first.app.run(first.app.batches.wait_drained())
    assert second.ended(waiting["id"])["status"] in ("completed",)


def test_cleaning_never_makes_the_file_of_an_upload_that_is_refused_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path, OwnerLimits(1, 1_000))
    store.add_file(FileRecord("file-0", "", "batch", "in", 1, 0, 2**40))
    store.content("file-0").write_bytes(b"x")
    locks: list[Path] = []

    def refused_meanwhile(path: Path, *, create: bool) -> FileLock | None:
        locks.append(path)
        store.drop_file("file-0")
        try:
            return try_acquire(path, create=create)
        finally:
            assert not path.exists()

    monkeypatch.setattr(batch_store, "try_acquire", refused_meanwhile)
    store.clean()
    assert locks == [store.content("file-0")]
    store.close()


def test_what_a_process_that_ended_has_left_is_cleaned_and_what_one_writes_is_not(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, OwnerLimits(1, 1_000))
    records = [FileRecord(f"file-{n}", "", "batch", "in", 1, 0, 2**40) for n in range(5)]
    for record in records:
        store.add_file(record)
        store.content(record.id).write_bytes(b"x")
    store.content("orphan").write_bytes(b"x")
    store.finish_file(records[0])
    records[1].expires_s = 1
    store.finish_file(records[1])
    store.finish_file(records[4])
    store.content("file-4").unlink()  # and then the deletion has ended
    with acquire(store.content("file-2")):
        store.clean()
    assert [record.id for record in store.files("", Page(10))[0]] == ["file-0"]
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"file-0", "file-2"}
    store.finish_file(records[2])
    assert store.file("", "file-2").is_ready
    assert file_object(store.file("", "file-0"))["bytes"] == 1
    store.close()
