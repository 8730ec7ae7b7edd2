"""Tensors as bytes behind the JSON, as Triton's clients send and ask for them. The JSON is in ``oip.json``."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.engine.fake import FakeEngine
from bei.errors import InvalidRequestError
from bei.server.dialects import oip
from bei.server.dialects.oip_tensors import LENGTH_HEADER, Tensor, content_of
from bei.server.endpoint.render import INLINE_BYTES, PIECE_BYTES, Octets, pieces_of, whole
from tests.bei.server.app import App
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import LABELS, post
from tests.support.artifacts import LIMITS

TEXTS = ["hello", "the cat", "é😀"]
MAX_INPUTS = 8


def encoded(texts: list[str]) -> bytes:
    parts = [text.encode() for text in texts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def binary(
    texts: list[str], shape: list[int] | None = None, behind: bytes | None = None, **fields: Any
) -> tuple[bytes, bytes]:
    """The JSON, and what stands behind it."""
    behind = encoded(texts) if behind is None else behind
    tensor = {"name": "text", "shape": shape or [len(texts)], "datatype": "BYTES"}
    return json.dumps(
        {"inputs": [{**tensor, "parameters": {"binary_data_size": len(behind)}}], **fields}
    ).encode(), behind


def send(app: App, model: str, head: bytes, behind: bytes, length: str | None = None) -> httpx.Response:
    headers = {"Inference-Header-Content-Length": str(len(head)) if length is None else length}
    path = f"/oip/v2/models/{model}/infer"
    response: httpx.Response = app.run(app.client.post(path, content=head + behind, headers=headers))
    return response


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


def outputs_of(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    """The JSON of an answer, and what stands behind it."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers[LENGTH_HEADER])
    return json.loads(response.content[:length]), response.content[length:]


def in_json(app: App, model: str, texts: list[str], shape: list[int] | None = None, **fields: Any) -> Any:
    tensor = {"name": "text", "shape": shape or [len(texts)], "datatype": "BYTES", "data": texts}
    return post(app, f"/oip/v2/models/{model}/infer", inputs=[tensor], **fields).json()


def test_bytes_in_and_out_are_the_numbers_of_the_json(kinds: App) -> None:
    head, behind = binary(TEXTS, parameters={"binary_data_output": True}, id="a1")
    found, content = outputs_of(send(kinds, "embedder", head, behind))
    expected = in_json(kinds, "embedder", TEXTS)["outputs"][0]
    output = {"name": "embedding", "shape": [3, 8], "datatype": "FP32", "parameters": {"binary_data_size": 96}}
    assert found == {"model_name": "embedder", "id": "a1", "outputs": [output]}
    np.testing.assert_array_equal(np.frombuffer(content, "<f4"), np.array(expected["data"], np.float32))


def test_outputs_may_differ_in_where_they_stand(kinds: App) -> None:
    scores, labels = {"name": "scores"}, {"name": "labels", "parameters": {"binary_data": True}}
    head, behind = binary(TEXTS, outputs=[labels, scores])
    found, content = outputs_of(send(kinds, "classifier", head, behind))
    assert [output["name"] for output in found["outputs"]] == ["labels", "scores"]
    assert found["outputs"][1]["data"] == in_json(kinds, "classifier", TEXTS)["outputs"][0]["data"]
    assert content == encoded(LABELS)


def test_pairs_come_as_bytes_too(kinds: App) -> None:
    flat = ["cat", "hello", "cat", "the cat"]
    head, behind = binary(flat, [2, 2])
    found = send(kinds, "reranker", head, behind).json()
    assert found == in_json(kinds, "reranker", flat, [2, 2])
    # In their order, and not sorted.
    ranks = post(kinds, "/rerank", query="cat", texts=["hello", "the cat"], model="reranker").json()
    by_index = sorted(ranks, key=lambda rank: rank["index"])
    assert found["outputs"][0]["data"] == pytest.approx([rank["score"] for rank in by_index])


@pytest.mark.parametrize(
    ("behind", "shape", "message"),
    [
        (encoded(["a"]), [2], "end within text 1 of 2"),
        (encoded(["a", "b"])[:-1], [2], "end within text 1 of 2"),
        (b"\xff\xff\xff\xffa", [1], "end within text 0 of 1"),
        (encoded(["a", "b"]), [1], "5 bytes follow the 1 texts"),
        (b"\x01\x00\x00\x00\xff", [1], "Text 0 is not valid UTF-8"),
        (encoded(["a"] * 9), [9], "9 inputs, the limit is 8"),
        (encoded(["a"]), [10**18, 1], "the limit is 8"),
        (b"", [1], "end within text 0 of 1"),
    ],
)
def test_bytes_that_are_not_these_texts_are_refused(kinds: App, behind: bytes, shape: list[int], message: str) -> None:
    head, _ = binary([], shape, behind)
    assert message in error_of(send(kinds, "embedder", head, behind))


@pytest.mark.parametrize("length", ["-1", "1e2", "abc", "", "99999999999999999999", "12345", "٣"])
def test_a_length_that_is_none_is_refused(kinds: App, length: str) -> None:
    head, behind = binary(TEXTS)
    headers = {b"Inference-Header-Content-Length": length.encode()}
    path = "/oip/v2/models/embedder/infer"
    response = kinds.run(kinds.client.post(path, content=head + behind, headers=headers))
    assert "inference-header-content-length must be a number of bytes" in error_of(response)


def test_bytes_of_which_no_input_speaks_are_refused(kinds: App) -> None:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    head = json.dumps({"inputs": [tensor]}).encode()
    assert "2 bytes follow the JSON, of which no input speaks" in error_of(send(kinds, "embedder", head, b"xy"))
    head, behind = binary(TEXTS)
    announced = "binary_data_size announces 30 bytes behind the JSON, and there are 32"
    assert announced in error_of(send(kinds, "embedder", head, behind + b"xy"))


@given(st.binary(max_size=40), st.integers(0, 4), st.integers(0, 3))
@settings(max_examples=200)
def test_whatever_bytes_stand_behind_the_json_are_texts_or_refused(behind: bytes, count: int, width: int) -> None:
    head, _ = binary([], [count, width], behind)
    try:
        parsed = oip.parse(head + behind, MAX_INPUTS, "m", str(len(head)))
    except InvalidRequestError:
        return
    assert len(parsed.inputs) == count
    texts = [text for one in parsed.inputs for text in ((one,) if isinstance(one, str) else one)]
    assert encoded(texts) == behind


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=MAX_INPUTS))
def test_texts_come_back_from_their_bytes(texts: list[str]) -> None:
    head, behind = binary(texts, [len(texts)])
    assert oip.parse(head + behind, MAX_INPUTS, "m", str(len(head))).inputs == texts


@pytest.mark.parametrize("is_binary", [False, True])
def test_a_large_answer_is_the_same_in_pieces(is_binary: bool) -> None:
    values = np.random.default_rng(0).standard_normal((500, 300), np.float32)
    content = content_of({"model_name": "m"}, [Tensor("a", values, is_binary), Tensor("b", ["x", "yé"], is_binary)])
    assert isinstance(content, Octets) is is_binary
    pieces = list(pieces_of(content))
    assert b"".join(pieces) == whole(content)
    assert max(map(len, pieces)) < 2.5 * PIECE_BYTES
    assert len(whole(content)) > INLINE_BYTES


def test_a_name_with_slashes_is_a_path(make_app: MakeApp, second_artifact: Any) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    for path in ("org/second", "org%2Fsecond"):
        assert app.get(f"/oip/v2/models/{path}").json()["name"] == "org/second"
        assert app.get(f"/oip/v2/models/{path}/ready").json()["ready"] is True
        assert in_json(app, path, ["cat"])["model_name"] == "org/second"


@pytest.mark.parametrize("path", ["embedder/infer", "org/second/infer"])
def test_a_get_of_what_is_asked_by_post_says_so(kinds: App, path: str) -> None:
    response = kinds.get(f"/oip/v2/models/{path}")
    assert "does not take GET" in error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_server_may_speak_it_on_the_paths_that_clients_know(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), dialect="oip")
    assert app.get("/v2/health/live").json() == {"live": True}
    assert app.get("/v2/health/ready").json() == {"ready": True}
    assert app.get("/v2").json()["name"] == "bei"
    assert set(app.get("/v2/models/other").json()) == {"error"}
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["cat"]}
    assert post(app, "/v2/models/tiny/infer", inputs=[tensor]).status_code == 200
    assert post(app, "/v1/embeddings", input="cat").status_code == 200


def test_a_dead_model_is_neither_live_nor_ready(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    for path in ("/oip/v2/health/live", "/oip/v2/health/ready", "/oip/v2/models/tiny/ready"):
        assert app.get(path).status_code == 200
    (service,) = app.models
    service.close()
    for path in ("/oip/v2/health/live", "/oip/v2/health/ready", "/oip/v2/models/tiny/ready"):
        assert set(app.get(path).json()) == {"error"}
        assert app.get(path).status_code == 503


def test_full_queues_and_deadlines_have_their_statuses(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), max_queue_tokens=4)
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["the cat the cat"] * 2}
    response = post(app, "/oip/v2/models/tiny/infer", inputs=[tensor])
    assert "split" in error_of(response)
