"""What JSON allows and the decoder does not: halves of surrogate pairs, a mark in front, 2.0 for 2, on every route."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.errors import InvalidTextError
from bei.server.endpoint import lenient_json
from tests.bei.server.app import App, check_error
from tests.bei.server.endpoint.test_input_report import REPORTING, ask
from tests.bei.server.endpoint.test_route import GOOD, filled

HALF = "has half a surrogate pair at"
BAD = "cut off \ud83d here"

WITH_TEXTS = sorted(set(GOOD) - {"/decode", "/detokenize"})


def raw(app: App, path: str, body: bytes) -> httpx.Response:
    response: httpx.Response = app.run(app.client.post(path, content=body))
    return response


def message_of(response: httpx.Response) -> str:
    """What an answer says, in whatever form its dialect has errors."""
    assert response.status_code in (400, 422), response.text
    return response.text


def field_of(path: str) -> str:
    return {"/vertex": "instances", "/similarity": "sentences"}.get(path, GOOD[path][1])


@pytest.mark.parametrize("path", WITH_TEXTS)
def test_half_a_character_is_an_error_of_its_input_on_every_route(kinds: App, path: str) -> None:
    body = filled(path, ["cat", BAD]) if path != "/vertex" else {"instances": [{"inputs": "cat"}, {"inputs": BAD}]}
    index = 0 if path == "/v1/ranking" and len(body["passages"]) == 1 else 1
    message = message_of(raw(kinds, path, json.dumps({**body, "model": GOOD[path][2]}).encode()))
    assert f"{field_of(path)} {index} {HALF} 8 (\\\\ud83d)" in message


@pytest.mark.parametrize("path", sorted(REPORTING))
def test_with_a_report_the_others_are_answered(kinds: App, path: str) -> None:
    _, field, model = GOOD[path]
    body = {**filled(path, ["cat", BAD, "hello", "\udfff", ""]), "model": model}
    response = ask(kinds, path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    good = ask(kinds, path, {**body, field: ["cat", "hello"]}).json()
    report, expected = response.json()["report"], good["report"]
    assert [entry["tokens"] for entry in report] == [expected[0]["tokens"], 0, expected[1]["tokens"], 0, 0]
    errors = [entry["error"] and entry["error"]["code"] for entry in report]
    assert errors == [None, "invalid_text", None, "invalid_text", "invalid_request"]
    assert f"{field} 1 {HALF} 8" in report[1]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/jina/v1/embeddings", {"model": "tiny", "input": ["cat", {"text": BAD}]}),
        ("/voyage/v1/embeddings", {"model": "tiny", "input": ["cat", BAD]}),
        ("/infinity/embeddings", {"input": ["cat", BAD]}),
        ("/nim/v1/embeddings", {"model": "tiny", "input": ["cat", BAD], "input_type": "passage"}),
        ("/tei/embed", {"inputs": ["cat", BAD]}),
        (
            "/cohere/v2/embed",
            {
                "model": "tiny",
                "input_type": "search_document",
                "embedding_types": ["float"],
                "inputs": [
                    {"content": [{"type": "text", "text": "cat"}]},
                    {"content": [{"type": "text", "text": "cat"}, {"type": "text", "text": BAD}]},
                ],
            },
        ),
    ],
)
def test_every_dialect_names_the_input_and_reports_it(app: App, path: str, body: dict[str, Any]) -> None:
    assert f"1 {HALF} 8" in message_of(raw(app, path, json.dumps(body).encode()))
    response = ask(app, path, body)
    assert response.status_code == 200, response.text
    assert [entry["error"] and entry["error"]["code"] for entry in response.json()["report"]] == [None, "invalid_text"]


def test_a_single_input_of_a_report_is_reported(app: App) -> None:
    (entry,) = ask(app, "/v1/embeddings", {"input": BAD}).json()["report"]
    assert entry["error"]["code"] == "invalid_text"
    assert entry["error"]["message"].startswith("input 0 has half")


def test_a_long_body_is_mended_as_a_short_one(app: App) -> None:
    inputs = ["cat " * 5_000, BAD, "\U0001f600" * 1_000]
    assert [entry["error"] is None for entry in ask(app, "/v1/embeddings", {"input": inputs}).json()["report"]] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "a", "model": "ti\udc00ny"}, "model has half a surrogate pair at 2"),
        ({"input": "a", "user": "\ud800"}, "user has half a surrogate pair at 0"),
        ({"input": "a", "metadata": {"x": ["\ud800"]}}, "x 0 has half"),
        ({"input": "a", "\ud800": 1}, "The body has half"),
        ({"input": "a", "extra": {"\ud800": 1}}, "extra has half"),
    ],
)
@pytest.mark.parametrize("reports", [False, True])
def test_other_strings_of_a_body_are_named(app: App, body: dict[str, Any], message: str, reports: bool) -> None:
    response = ask(app, "/v1/embeddings", body) if reports else app.embed(**body)
    check_error(response, 400, message, code="invalid_text")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (rb'"\\ud83d"', r"\ud83d"),  # a backslash, and letters
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"\\\ud83d\ude00"', "\\\U0001f600"),
    ],
)
def test_what_looks_like_a_half_is_none(app: App, written: bytes, text: str) -> None:
    # Beside one that is, so that the body is looked at again.
    body = b'{"input": [' + written + rb', "\ud83d"]}'
    response = app.run(app.client.post("/v1/embeddings", content=body, headers={"x-bei-report": "1"})).json()
    assert response["data"][0] == app.embed(input=[text]).json()["data"][0]
    assert response["report"][1]["error"]["code"] == "invalid_text"


def test_halves_of_two_pairs_side_by_side_are_halves(app: App) -> None:
    check_error(app.post(rb'{"input": "\ude00\ud83d"}'), 400, "at 0 (\\ude00)", code="invalid_text")
    check_error(app.post(rb'{"input": "\ud83d\ud83d\ude00"}'), 400, "at 0 (\\ud83d)", code="invalid_text")


@pytest.mark.parametrize("path", sorted(GOOD))
def test_a_byte_order_mark_in_front_is_passed_over(kinds: App, path: str) -> None:
    body, _, model = GOOD[path]
    content = json.dumps(body if path in {"/v1/ranking"} else {**body, "model": model}).encode()
    marked, plain = raw(kinds, path, b"\xef\xbb\xbf" + content), raw(kinds, path, content)
    assert marked.status_code == plain.status_code
    assert raw(kinds, path, b"\xef\xbb\xbf\xef\xbb\xbf" + content).status_code in (400, 422)


# Numbers


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"dimensions": 4}),
        ("/v1/embeddings", {"dimensions": 4, "truncate_prompt_tokens": 5, "output_dimension": 4}),
        ("/embed", {"dimensions": 4}),
        ("/embed_sparse", {"top_k": 2}),
        ("/v1/rerank", {"top_n": 1, "max_tokens_per_doc": 4, "max_tokens_per_query": -1}),
        ("/decode", {"ids": [[5, 6]]}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/v2/embed", {"output_dimension": 4}),
    ],
)
def test_a_whole_number_is_an_integer_however_it_is_written(kinds: App, path: str, fields: dict[str, Any]) -> None:
    body, _, model = GOOD[path]
    body = {**body, "model": model}
    plain = raw(kinds, path, json.dumps({**body, **fields}).encode())
    assert plain.status_code == 200, plain.text
    for change in (lambda number: number + 0.5, str, lambda _: True):
        message_of(raw(kinds, path, json.dumps({**body, **_changed(fields, change)}).encode()))
    changed = raw(kinds, path, json.dumps({**body, **_changed(fields, float)}).encode())
    assert changed.status_code == 200, changed.text
    assert _without_its_own(changed.json()) == _without_its_own(plain.json())


def _without_its_own(answer: Any) -> Any:
    """Without what each answer has of its own."""
    return {**answer, "id": "", "created": 0} if isinstance(answer, dict) else answer


def _changed(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {name: _changed(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    return change(value) if isinstance(value, int) else value


def test_token_ids_are_whole_numbers_however_they_are_written(app: App) -> None:
    for ids in ([2, 9, 3], [[2, 9, 3], [4]], ["cat", [2, 9]]):
        assert app.embed(input=_changed(ids, float)).json() == app.embed(input=ids).json()


@pytest.mark.parametrize("written", [b"4e0", b"40e-1", b"4.000"])
def test_whole_numbers_in_other_notations(app: App, written: bytes) -> None:
    response = app.post(b'{"input": "cat", "dimensions": ' + written + b"}")
    assert response.json() == app.embed(input="cat", dimensions=4).json()


def test_what_is_no_whole_number_is_named(app: App) -> None:
    check_error(app.embed(input="a", dimensions=2.5), 400, "got `float`", param="dimensions")
    check_error(app.embed(input="a", dimensions=4.0, truncate_prompt_tokens=2.5), 400, param="truncate_prompt_tokens")


def test_numbers_and_halves_are_mended_together(app: App) -> None:
    response = ask(app, "/v1/embeddings", {"input": ["cat", BAD], "dimensions": 4.0})
    assert [one["embedding"] is None for one in response.json()["data"]] == [False, True]
    assert len(response.json()["data"][0]["embedding"]) == 4


@pytest.mark.parametrize("deep", [b"[" * 2_000 + b"1.0" + b"]" * 2_000, b'{"a":' * 900 + b"1.0" + b"}" * 900])
def test_what_is_deep_or_large_beside_it_is_refused_as_before(app: App, deep: bytes) -> None:
    check_error(app.post(b'{"input": "\\ud83d", "dimensions": ' + deep + b"}"), 400)
    check_error(app.post(b'{"input": "cat", "dimensions": ' + deep + b"}"), 400)
    check_error(app.post(b'{"input": "cat", "dimensions": 2.0, "x": ' + b"9" * 5_000 + b"}"), 400)
    check_error(app.post(b'{"input": "\\ud83d", "dimensions": ' + b"9" * 4_200 + b"}"), 400, code="invalid_text")


# Anything at all

_any_text = st.text(st.characters(exclude_categories=[]), max_size=8)
_texts = st.lists(_any_text, min_size=1, max_size=6)


def is_good(text: str) -> bool:
    return bool(text) and not any("\ud800" <= one <= "\udfff" for one in text)


@settings(max_examples=150, deadline=None)
@given(texts=_texts, ascii_only=st.booleans())
def test_any_json_text_of_python_s_is_answered_or_refused_by_its_place(
    app: App, texts: list[str], ascii_only: bool
) -> None:
    # json joins two halves that stand side by side in Python's string, as every JSON parser does.
    content = json.dumps({"input": texts})
    read = json.loads(content)["input"]
    wrong = [index for index, text in enumerate(read) if not is_good(text)]
    response = app.post(content.encode())
    assert response.status_code == (400 if wrong else 200)
    if wrong:
        message = check_error(response, 400, param="input")
        assert any(message.startswith(f"input {index} ") for index in wrong)
    reported = app.run(app.client.post("/v1/embeddings", content=content.encode(), headers={"x-bei-report": "1"}))
    assert reported.status_code == 200
    assert [entry["index"] for entry in reported.json()["report"] if entry["error"]] == wrong


def test_nested_lists_take_no_memory_by_their_product() -> None:
    nested = b"[" * 900 + b",".join([b"[]"] * 20_000) + b"]" * 900
    content = b'{"x":' + nested + b',"inputs":["\\ud83d"]}'
    tracemalloc.start()
    try:
        with pytest.raises(InvalidTextError, match="inputs 0"):
            lenient_json._without_halves(content, False)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
