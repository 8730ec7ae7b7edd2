"""The routes of files and batches: forms of uploads, refusals, pages, and what each key may see and have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bei.scheduler.front import wait_until
from tests.bei.server.app import App
from tests.bei.server.batches.conftest import MakeClients
from tests.bei.server.batches.served import line, lines

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


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/nothing"}, 400, "endpoint"),
        ({"endpoint": "/health"}, 400, "endpoint"),
        ({"endpoint": "/v1/files"}, 400, "endpoint"),
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


@pytest.mark.parametrize("endpoint", ["/embed", "/tei/embed", "/cohere/v2/rerank", "/vllm/v1/score", "/v1/rerank"])
def test_every_route_that_asks_a_model_is_an_endpoint(serve: MakeClients, endpoint: str) -> None:
    clients = serve()
    assert clients.create(line("a", url=endpoint), endpoint=endpoint).status_code == 200


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
