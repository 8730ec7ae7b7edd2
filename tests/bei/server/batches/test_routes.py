"""The routes of files and batches: forms of uploads, refusals, pages, and what each key may see and have."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from bei.server.batches import files_routes
from bei.server.batches.records import BatchRecord, FileObject, FileRecord, file_object
from tests.bei.scheduler.front import wait_until
from tests.bei.server.app import App
from tests.bei.server.batches.conftest import MakeClients
from tests.bei.server.batches.served import execute, line, lines

BOUNDARY = "edge"


def form(*parts: tuple[str, bytes], end: bytes = b"--edge--\r\n") -> dict[str, Any]:
    """A form that is written by hand."""
    written = b"".join(b"--edge\r\n" + head.encode() + b"\r\n\r\n" + body + b"\r\n" for head, body in parts)
    return {"content": written + end, "headers": {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}}


FILE = 'Content-Disposition: form-data; name="file"; filename="in.jsonl"'
PURPOSE = 'Content-Disposition: form-data; name="purpose"'


def test_a_file_is_kept_as_it_was_sent_until_it_is_deleted(serve: MakeClients, tmp_path: Path) -> None:
    clients = serve()
    content = b"any bytes\r\n--edge\x00\xff" * 10_000
    made = clients.upload(content).json()
    assert (made["bytes"], made["filename"], made["purpose"]) == (len(content), "in.jsonl", "batch")
    assert made["expires_at"] == made["created_at"] + 30 * 86_400
    assert clients.ask("GET", f"/v1/files/{made['id']}").json() == made
    assert clients.ask("GET", f"/v1/files/{made['id']}/content").content == content
    assert clients.ask("DELETE", f"/v1/files/{made['id']}").json() == {
        "id": made["id"],
        "object": "file",
        "deleted": True,
    }
    assert clients.ask("GET", f"/v1/files/{made['id']}").status_code == 404
    wait_until(lambda: not [*(tmp_path / "batches" / "files").iterdir()], "what had been read is removed")


def test_fields_may_stand_behind_the_file_and_say_how_long_it_is_kept(serve: MakeClients) -> None:
    clients = serve()
    assert clients.ask("POST", "/v1/files", **form((FILE, b"x"), (PURPOSE, b"batch"))).status_code == 200
    kept = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    made = clients.upload(b"x", fields=kept).json()
    assert made["expires_at"] == made["created_at"] + 3_600


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"json": {}}, 400, "multipart/form-data"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "multipart/form-data"),
        (form((FILE, b"x"), (PURPOSE, b"batch"), end=b""), 400, "ends too early"),
        ({**form(), "content": b"garbage"}, 400, "cannot be read"),
        (form((FILE, b"x"), (FILE, b"y"), (PURPOSE, b"batch")), 400, "two files"),
        (form((PURPOSE, b"batch")), 400, "no file"),
        (form((FILE, b"x")), 400, "purpose must be batch"),
        (form((FILE, b"x"), (PURPOSE, b"fine-tune")), 400, "purpose must be batch"),
        (form((FILE, b"x"), (PURPOSE, b"x" * 20_000)), 400, "too long"),
        (form((FILE, b"x"), ('Content-Disposition: form-data; name="other"', b"x")), 400, "'other'"),
        (form((FILE, b"x" * 1_001), (PURPOSE, b"batch")), 413, "batch_file_limit"),
        ({**form((FILE, b"x" * 300_000), (PURPOSE, b"batch"))}, 413, "batch_file_limit"),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(
    serve: MakeClients, tmp_path: Path, given: dict[str, Any], status: int, said: str
) -> None:
    clients = serve(batch_file_limit=1_000)
    answer = clients.ask("POST", "/v1/files", **given)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    assert clients.ask("GET", "/v1/files").json()["data"] == []
    assert [*(tmp_path / "batches" / "files").iterdir()] == []


def test_an_encoded_upload_is_refused(serve: MakeClients) -> None:
    asked = form((FILE, b"x"), (PURPOSE, b"batch"))
    asked["headers"]["content-encoding"] = "gzip"
    assert serve().ask("POST", "/v1/files", **asked).status_code == 415


@pytest.mark.parametrize("seconds", ["3599", "2592001", "x", "-1", "9" * 30])
def test_a_lifetime_has_openai_s_bounds(serve: MakeClients, seconds: str) -> None:
    fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
    answer = serve().upload(b"x", fields=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_after")


def test_lists_have_pages(serve: MakeClients) -> None:
    clients = serve()
    made = [clients.upload(b"x").json()["id"] for _ in range(5)]
    page = clients.ask("GET", "/v1/files?limit=2").json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([made[4], made[3]], True)
    assert (page["first_id"], page["last_id"]) == (made[4], made[3])
    page = clients.ask("GET", f"/v1/files?limit=3&after={made[3]}").json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([made[2], made[1], made[0]], False)
    page = clients.ask("GET", "/v1/files?order=asc&purpose=batch").json()
    assert [one["id"] for one in page["data"]] == made
    assert clients.ask("GET", "/v1/files?purpose=batch_output").json()["data"] == []
    for query in ("limit=0", "limit=10001", "limit=x", "order=up", "after=file-x", "purpose=vision"):
        answer = clients.ask("GET", f"/v1/files?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_list_is_made_off_the_event_loop(serve: MakeClients, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = serve()
    made = [clients.upload(b"x").json() for _ in range(2)]
    threads: list[int] = []

    def described(record: FileRecord) -> FileObject:
        threads.append(threading.get_ident())
        return file_object(record)

    monkeypatch.setattr(files_routes, "file_object", described)
    assert clients.ask("GET", "/v1/files?order=asc").json()["data"] == made
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("ranges", "status", "content"),
    [
        (["bytes=2-4"], 206, b"234"),
        (["Bytes=7-"], 206, b"789"),
        (["bytes=-2"], 206, b"89"),
        (["bytes=5-99"], 206, b"56789"),
        (["bytes=10-"], 416, b""),
        (["bytes=-0"], 416, b""),
        (["bytes=" + "9" * 50 + "-"], 416, b""),
        (["items=2-4"], 200, b"0123456789"),
        (["bytes=4-2"], 200, b"0123456789"),
        (["bytes=99-2"], 200, b"0123456789"),
        (["bytes=1-2,x"], 200, b"0123456789"),
        (["bytes="], 200, b"0123456789"),
        (["bytes=-"], 200, b"0123456789"),
        (["bytes=" + "9" * 5_000 + "-"], 200, b"0123456789"),
        (["bytes 2-4"], 200, b"0123456789"),
        (["bytes=+1-2"], 200, b"0123456789"),
        (["\xff"], 200, b"0123456789"),
        (["bytes=1-2", "bytes=4-5"], 200, b"0123456789"),
    ],
)
def test_ranges_of_a_file_are_sent_and_what_is_none_is_passed_over(
    serve: MakeClients, ranges: list[str], status: int, content: bytes
) -> None:
    clients = serve()
    path = f"/v1/files/{clients.upload(b'0123456789').json()['id']}/content"
    headers = [(b"range", value.encode("latin-1")) for value in ranges]
    answer = clients.app.run(clients.app.client.get(path, headers=headers))
    assert (answer.status_code, answer.content) == (status, content)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/nothing"}, 400, "endpoint"),
        ({"endpoint": "/health"}, 400, "endpoint"),
        ({"endpoint": "/v1/files"}, 400, "endpoint"),
        ({"endpoint": "/v1/files/"}, 400, "endpoint"),
        ({"endpoint": "v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": "/api/tags"}, 400, "endpoint"),
        ({"endpoint": 7}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"completion_window": "0s"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3_600}}, 400, "output_expires_after.anchor"),
        ({"input_file_id": "file-x"}, 404, None),
    ],
)
def test_a_wrong_batch_is_refused(serve: MakeClients, fields: dict[str, Any], status: int, param: str | None) -> None:
    answer = serve().create(line("a"), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_byte_order_mark_in_front_is_passed_over(serve: MakeClients) -> None:
    clients = serve()
    file_id = clients.upload(line("a")).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    content = b"\xef\xbb\xbf" + json.dumps(asked).encode()
    assert clients.ask("POST", "/v1/batches", content=content).status_code == 200


@pytest.mark.parametrize("endpoint", ["/embed", "/tei/embed", "/cohere/v2/rerank", "/vllm/v1/score", "/v1/rerank"])
def test_every_route_that_asks_a_model_is_an_endpoint(serve: MakeClients, endpoint: str) -> None:
    clients = serve()
    assert clients.create(line("a", url=endpoint), endpoint=endpoint).status_code == 200


@pytest.mark.parametrize(
    ("settings", "endpoint", "text_field"),
    [
        ({}, "/api/embed", "input"),
        ({}, "/v1/embeddings/", "input"),
        ({}, "/openai/deployments/%74iny/embeddings?api-version=1", "input"),
        ({"predict_path": "/predict/7"}, "/predict/7", "instances"),
        ({"root_path": "/root"}, "/root/v1/embeddings", "input"),
        ({"root_path": "/root"}, "/v1/embeddings", "input"),
        ({"dialect": "cohere"}, "/v1/embed", "texts"),
    ],
)
def test_an_endpoint_is_any_path_that_answers_over_http(
    serve: MakeClients, settings: dict[str, str], endpoint: str, text_field: str
) -> None:
    clients = serve(**settings)
    body = {text_field: [{"inputs": "a"}] if text_field == "instances" else ["a"], "model": "tiny"}
    written = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body}).encode()
    made = clients.create(written, endpoint=endpoint)
    assert made.status_code == 200, made.text
    assert clients.ask("POST", endpoint, json=body).status_code == 200
    assert clients.ended(made.json()["id"])["request_counts"]["completed"] == 1


def test_a_file_that_a_batch_reads_stays(serve: MakeClients) -> None:
    clients = serve(keys=True)
    batch = clients.create(lines(3), "one").json()
    done = clients.ended(batch["id"], "one")
    refused = clients.ask("POST", "/v1/batches", "one", json={**batch, "input_file_id": done["output_file_id"]})
    assert refused.status_code == 400  # it is no input
    assert clients.ask("DELETE", f"/v1/files/{batch['input_file_id']}", "one").status_code == 200


def test_a_key_sees_nothing_of_another_s(serve: MakeClients) -> None:
    clients = serve(keys=True)
    batch = clients.create(lines(3), "one").json()
    done = clients.ended(batch["id"], "one")
    for path in (
        f"/v1/files/{batch['input_file_id']}",
        f"/v1/files/{done['output_file_id']}/content",
        f"/v1/batches/{batch['id']}",
    ):
        assert clients.ask("GET", path, "one").status_code == 200
        assert clients.ask("GET", path, "other").status_code == 404
        assert clients.ask("GET", path).status_code == 401
    assert clients.ask("POST", f"/v1/batches/{batch['id']}/cancel", "other").status_code == 404
    assert clients.ask("DELETE", f"/v1/files/{batch['input_file_id']}", "other").status_code == 404
    asked = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    assert clients.ask("POST", "/v1/batches", "other", json=asked).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert clients.ask("GET", path, "other").json()["data"] == []
        assert clients.ask("GET", f"{path}?after={batch['id']}", "other").status_code == 400


def test_a_key_has_limits_of_its_own(serve: MakeClients) -> None:
    clients = serve(keys=True, batch_disk_limit=1_000, batch_file_limit=600)
    assert clients.upload(b"x" * 600, "one").status_code == 200
    refused = clients.upload(b"x" * 600, "one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota_exceeded")
    assert clients.upload(b"x" * 600, "other").status_code == 200


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/batches/batch_1", "/v1/files/file-1/content"])
def test_without_a_folder_the_routes_say_what_to_do(app: App, path: str) -> None:
    answer = app.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
    assert "--batch-dir" in answer.json()["error"]["message"]


# In place of a record: what a crash or another version may leave. Of the last one all fields have their types.
UNREADABLE = {
    "empty": b"{}",
    "garbage": b"garbage",
    "utf8": b"\xff",
    "never": b'{"id":"batch_x","owner":"","endpoint":"","input_id":"","window":"","expires_s":0,"output_lifetime_s":0,'
    b'"metadata":null,"status":"completed","moved_s":{},"output_id":"","error_id":""}',
}


@pytest.mark.parametrize("record", [*UNREADABLE.values()], ids=[*UNREADABLE])
def test_a_finished_batch_whose_record_cannot_be_read_is_an_error_of_its_own_and_its_answers_are_there(
    record: bytes, serve: MakeClients, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients = serve()
    before, damaged, behind = (clients.ended(clients.create(lines(3)).json()["id"]) for _ in range(3))
    execute(tmp_path / "batches", "UPDATE batches SET record = ? WHERE id = ?", record, damaged["id"])
    for method, path in (("GET", damaged["id"]), ("POST", f"{damaged['id']}/cancel")):
        answer = clients.ask(method, f"/v1/batches/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "record_unreadable")
        assert f"{damaged['id']}_output.jsonl" in answer.json()["error"]["message"]
    found = clients.ask("GET", "/v1/batches?limit=2").json()
    assert ([one["id"] for one in found["data"]], found["has_more"]) == ([behind["id"], before["id"]], False)
    assert f"a list leaves out {damaged['id']}" in caplog.text
    first = clients.ask("GET", "/v1/batches?limit=1").json()
    assert (first["last_id"], first["has_more"]) == (behind["id"], True)
    rest = clients.ask("GET", f"/v1/batches?limit=1&after={damaged['id']}").json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([before["id"]], False)
    names = {one["filename"]: one["id"] for one in clients.ask("GET", "/v1/files").json()["data"]}
    assert len(clients.content(names[f"{damaged['id']}_output.jsonl"])) == 2


@pytest.mark.parametrize("record", [b"{}", b"garbage", b"\xff"], ids=["empty", "garbage", "utf8"])
def test_a_file_whose_record_cannot_be_read_is_an_error_of_its_own_and_can_be_deleted(
    record: bytes, serve: MakeClients, tmp_path: Path
) -> None:
    clients = serve()
    ids = [clients.upload(lines(3)).json()["id"] for _ in range(4)]
    for damaged in ids[1:3]:
        execute(tmp_path / "batches", "UPDATE files SET record = ? WHERE id = ?", record, damaged)
    for path in (ids[1], f"{ids[1]}/content"):
        answer = clients.ask("GET", f"/v1/files/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "record_unreadable")
        assert "delete it" in answer.json()["error"]["message"]
    for order, expected in (("asc", [ids[0], ids[3]]), ("desc", [ids[3], ids[0]])):
        for limit, has_more in ((1, True), (2, False)):
            found = clients.ask("GET", f"/v1/files?order={order}&limit={limit}").json()
            assert ([one["id"] for one in found["data"]], found["has_more"]) == (expected[:limit], has_more)
    asked = {"input_file_id": ids[1], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = clients.ask("POST", "/v1/batches", json=asked).json()
    assert clients.ended(batch["id"])["status"] == "completed"  # what it reads is the content
    assert clients.ask("DELETE", f"/v1/files/{ids[1]}").json()["deleted"]


def test_the_answers_of_a_batch_do_not_depend_on_the_records_of_their_files(serve: MakeClients, tmp_path: Path) -> None:
    clients = serve()
    assert clients.app.batches is not None
    store = clients.app.batches._store
    begin = store.begin_answers

    def begin_and_damage(batch: BatchRecord) -> None:
        begin(batch)
        execute(tmp_path / "batches", "UPDATE files SET record = 'x' WHERE id = ?", batch.output_id)

    store.begin_answers = begin_and_damage
    batch = clients.ended(clients.create(lines(3)).json()["id"])
    assert len(clients.content(batch["output_file_id"])) == 2
    assert (
        clients.ask("GET", f"/v1/files/{batch['output_file_id']}").json()["filename"] == f"{batch['id']}_output.jsonl"
    )
