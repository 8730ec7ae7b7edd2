"""Whatever a client sends: a 4xx that says what to do, never a 5xx, and the next good request is answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bei.engine.fake import FakeEngine
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS, VOCAB_SIZE

FORMS = (
    "input must be a text, a list of token ids, an object with a text, an image or both, "
    "or a list in which each is one of these"
)
NOT_JSON = "The body is not valid JSON"
IN_VOCABULARY = f"from 0 to {VOCAB_SIZE - 1}"


def check_still_answers(app: App) -> None:
    response = app.embed(input="cat", model="tiny")
    assert response.status_code == 200
    assert len(response.json()["data"]) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", NOT_JSON),
        (b"{", NOT_JSON),
        (b"hello", NOT_JSON),
        (b'{"input": "a"} {"input": "b"}', NOT_JSON),
        (b"{'input': 'a'}", NOT_JSON),
        (b'{"input": "a",}', NOT_JSON),
        (b'{"input": "line\nbreak"}', NOT_JSON),
        (b'{"input": "\\x41"}', NOT_JSON),
        (b'{"input": [1 2]}', NOT_JSON),
        (b'{"input": [-]}', NOT_JSON),
        ('{"input": "a"}'.encode("utf-16"), NOT_JSON),
        (b'{"input": "\xff\xfe"}', "in UTF-8"),
        (b'{"input": ["a", "\xe9"]}', "in UTF-8"),
        (b'{"input": "\xed\xa0\x80"}', "in UTF-8"),
        (b'{"input": "\\ud800', NOT_JSON),
        (b'{"input": "\\ud800", "user": tru}', NOT_JSON),
        (b'{"input": "a", "dimensions": NaN}', NOT_JSON),
        (b'{"input": "a", "dimensions": Infinity}', NOT_JSON),
        (b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"input": "a", "x": ' + b'{"x":' * 20_000 + b"1" + b"}" * 20_000 + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_is_not_json(make_app: MakeApp, body: bytes, message: str) -> None:
    app = make_app(FakeEngine(LIMITS))
    check_error(app.post(body), 400, message, type="invalid_request_error", code="invalid_request")
    check_still_answers(app)


@pytest.mark.parametrize("body", [b"null", b"1", b"[]", b'"a"', b"true", b"[" * 90_000])
def test_a_body_that_is_not_an_object(app: App, body: bytes) -> None:
    check_error(app.post(body), 400, "Expected `object`")
    check_still_answers(app)


def test_a_body_without_input(app: App) -> None:
    check_error(app.embed(model="tiny"), 400, "missing required field `input`")
    check_still_answers(app)


@pytest.mark.parametrize("given_input", [None, True, 7, 1.5, -1, {"text": 1}, [None], [True], [{"text": 1}]])
def test_input_of_no_known_form(app: App, given_input: object) -> None:
    check_error(app.embed(input=given_input), 400, FORMS, param="input", type="invalid_request_error")
    check_still_answers(app)


@pytest.mark.parametrize(
    ("given_input", "position"),
    [
        (["a", 1], "$[1]"),
        (["a", None], "$[1]"),
        (["a", ["b"]], "$[1]"),
        ([1, "a"], "$[1]"),
        ([1, None], "$[1]"),
        ([1, 2, [3]], "$[2]"),
        ([[1], 2], "$[1]"),
        ([[1], [2, "a"]], "$[1][1]"),
        ([[[1]]], "$[0][0]"),
        ([["a"]], "$[0][0]"),
        ([1.5], "$[0]"),
        ([1, 2.5], "$[1]"),
        ([-1], "$[0]"),
        ([[1], [-2]], "$[1][0]"),
    ],
)
def test_input_of_mixed_kinds_names_the_first_that_is_wrong(app: App, given_input: object, position: str) -> None:
    message = check_error(app.embed(input=given_input), 400, FORMS, param="input")
    assert position in message
    check_still_answers(app)


@pytest.mark.parametrize(
    ("given_input", "message"),
    [
        ({}, "An object in input holds one text or one image"),
        ([{}], "An object in input holds one text or one image"),
        ("", "input 0 is an empty text: leave it out"),
        (["a", "", "b"], "input 1 is an empty text: leave it out"),
        ([], "empty list: send at least one input"),
        ([[]], "empty: leave it out"),
        ([[1], []], "empty: leave it out"),
        ([VOCAB_SIZE], IN_VOCABULARY),
        ([[1, 2], [3, VOCAB_SIZE]], IN_VOCABULARY),
        ([2**31], IN_VOCABULARY),
        ([2**63], IN_VOCABULARY),
        ([2**64], IN_VOCABULARY),
        ([10**400], IN_VOCABULARY),
        ([1] * (LIMITS.max_seq_len + 1), "has 17 token ids, the model takes up to 16: shorten it"),
        (["a"] * 33, "has 33 inputs, the limit is 32: split it"),
        ([[1]] * 33, "has 33 inputs, the limit is 32: split it"),
    ],
)
def test_input_that_cannot_be_embedded(app: App, given_input: object, message: str) -> None:
    check_error(app.embed(input=given_input), 400, message, param="input")
    check_still_answers(app)


def test_blanks_in_an_empty_list_do_not_hide_that_it_is_empty(app: App) -> None:
    check_error(app.post(b'{"input": [ \n ]}'), 400, "empty list")


@pytest.mark.parametrize("dimensions", [-1, -(10**30), 9, 10**30, 1.5, 9.0, 1e300, "8", True, [8], {"a": 1}])
def test_dimensions_that_do_not_exist(app: App, dimensions: object) -> None:
    check_error(app.embed(input="a", dimensions=dimensions), 400, param="dimensions", type="invalid_request_error")
    check_still_answers(app)


def test_dimensions_with_more_digits_than_python_prints(app: App) -> None:
    check_error(app.post(b'{"input": "a", "dimensions": ' + b"9" * 50_000 + b"}"), 400, "dimensions")


@pytest.mark.parametrize("encoding_format", ["FLOAT", "int8", "", 1, ["float"]])
def test_an_unknown_encoding_format(app: App, encoding_format: object) -> None:
    check_error(app.embed(input="a", encoding_format=encoding_format), 400, param="encoding_format")
    check_still_answers(app)


@pytest.mark.parametrize(("field", "value"), [("user", 5), ("user", ["a"]), ("model", 5), ("model", ["tiny"])])
def test_a_field_of_the_wrong_type_is_named(app: App, field: str, value: object) -> None:
    check_error(app.embed(input="a", **{field: value}), 400, "Expected `str | null`", param=field)


@pytest.mark.parametrize("model", ["", "TINY", "text-embedding-3-small", "../tiny", "\x00", "☃" * 1000])
def test_an_unknown_model_is_404_and_names_those_that_are_served(app: App, model: str) -> None:
    response = app.embed(input="a", model=model)
    check_error(response, 404, "is not served here. Served: tiny.", param="model", code="model_not_found")
    check_still_answers(app)


# Size


async def _chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 1000):
        yield b"x" * 1000


def test_a_body_that_is_too_large_is_413_with_a_length_and_in_chunks(app: App) -> None:
    for content in (b"x" * 200_000, _chunks(200_000)):
        response = app.post(content)
        check_error(response, 413, "larger than 100000 bytes: send fewer", code="payload_too_large")
        check_still_answers(app)


def test_a_body_of_exactly_the_limit_is_accepted(app: App) -> None:
    frame = len(json.dumps({"input": ""}))
    assert app.embed(input="x" * (100_000 - frame)).status_code == 200
    check_error(app.embed(input="x" * (100_001 - frame)), 413)


def test_a_text_of_ten_megabytes_is_413_by_default(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    check_error(app.embed(input="x" * 10_000_000), 413, "larger than 8000000 bytes")
    check_still_answers(app)


@pytest.mark.parametrize("text", ["a " * 5_000_000, "x" * 1_000_000, " " * 1_000_000], ids=["words", "word", "blank"])
def test_a_text_of_megabytes_is_cut_where_such_bodies_are_allowed(make_app: MakeApp, text: str) -> None:
    app = make_app(FakeEngine(LIMITS), payload_limit=20_000_000)
    response = app.embed(input=text)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] <= LIMITS.max_seq_len
    check_still_answers(app)


@pytest.mark.parametrize("run", [" ", "\0", "\u200b", " \u200b"], ids=["blanks", "NULs", "zero width", "both"])
def test_what_stands_behind_100_000_characters_that_make_no_token_is_read(make_app: MakeApp, run: str) -> None:
    app = make_app(FakeEngine(LIMITS))
    plain, behind = app.embed(input="the cats"), app.embed(input=run * 100_000 + "the cats")
    assert behind.json() == plain.json()
    assert "x-truncated-inputs" not in behind.headers
    assert app.embed(input=run * 100_000 + "the cats " * 20).headers["x-truncated-inputs"] == "0"


def test_a_long_text_is_400_where_nothing_may_be_cut(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), auto_truncate=False)
    check_error(app.embed(input=["a", "b " * 100]), 400, "more than the model's 16 tokens: shorten it", param="input")
    check_still_answers(app)


# Anything at all

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),  # NaN and Infinity too: json.dumps writes them as no JSON parser takes them
    st.text(st.characters(exclude_categories=[]), max_size=10),
    st.sampled_from(["tiny", "float", "base64", 2**63, -(2**63), 2**64]),
)
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
_fields = st.sampled_from(["input", "model", "encoding_format", "dimensions", "user", "x"])
_near_requests = st.fixed_dictionaries(
    {
        "input": st.one_of(
            st.text(max_size=5), st.lists(st.integers(-1, VOCAB_SIZE)), st.lists(st.text(max_size=5)), _json
        )
    },
    optional={"model": _scalars, "encoding_format": _scalars, "dimensions": _scalars, "user": _scalars},
)


@settings(max_examples=400, deadline=None)
@given(
    body=st.one_of(
        st.binary(max_size=80),
        _json.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(_fields, _json, max_size=5).map(lambda value: json.dumps(value).encode()),
        _near_requests.map(lambda value: json.dumps(value).encode()),
        _near_requests.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
        st.tuples(_near_requests, st.integers(0, 60)).map(lambda pair: json.dumps(pair[0]).encode()[: pair[1]]),
    )
)
@example(body=b'{"input": "\\ud83d\\ude00"}')
def test_json_like_bodies_never_give_a_5xx(app: App, body: bytes) -> None:
    response = app.post(body)
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert len(check_error(response, response.status_code)) > 10


def test_after_all_of_the_above_the_server_is_alive(app: App) -> None:
    check_still_answers(app)
    assert app.get("/health").status_code == 200
    assert app.get("/ready").status_code == 200


def test_an_id_that_is_none_is_named_where_texts_stand_before_it(app: App) -> None:
    message = check_error(app.embed(input=["a", [1, -1]]), 400, FORMS, param="input")
    assert "`$[1][1]`" in message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/embed", {"input": "a"}, "inputs"),
        ("/rerank", {"texts": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a"}, "texts"),
        ("/tokenize", {}, "inputs"),
        ("/similarity", {"inputs": {"source_sentence": "a"}}, "inputs"),
        ("/vllm/pooling", {}, "input"),
        ("/vllm/v1/rerank", {"query": "a"}, "documents"),
    ],
)
def test_a_field_that_is_not_there_is_blamed(app: App, path: str, body: dict[str, object], param: str) -> None:
    response = app.request("POST", path, json.dumps(body).encode())
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/cohere/v1/rerank", "/cohere/v2/rerank", "/vllm/rerank", "/vllm/v2/rerank"])
def test_who_knows_documents_alone_hears_of_no_texts(kinds: App, path: str) -> None:
    for body in ({"query": "a"}, {"query": "a", "texts": ["b"]}):
        response = kinds.request("POST", path, json.dumps(body).encode())
        assert response.status_code == 400
        assert "missing required field `documents`" in response.text


def test_advice_on_token_ids_is_for_clients_of_every_language(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), openai_token_ids="refuse")
    message = check_error(app.embed(input=[1, 2]), 400, param="input")
    assert "Send the texts themselves (" in message
    assert "LangChain for Python: check_embedding_ctx_length=False" in message
