"""``POST /v1/embeddings``: what a good request gets. Bad requests are in test_bad_input.py."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from bei.errors import InvalidRequestError
from bei.server.http.responses import index_ranges
from bei.server.routes.openai_embeddings import parse_input, parse_request
from tests.bei.server.app import ROUTE, App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS, VOCAB_SIZE, expected_vectors, save_artifact, token_ids
from tests.support.engines import GatedEngine, NaNEngine, PickyEngine, sequences_of


def vectors_of(response: httpx.Response) -> npt.NDArray[np.float32]:
    """The vectors of a good answer, float or base64, in the order of their indices."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert {entry["object"] for entry in data} == {"embedding"}
    embeddings = [entry["embedding"] for entry in data]
    if isinstance(embeddings[0], str):
        return np.stack([np.frombuffer(base64.b64decode(embedding), "<f4") for embedding in embeddings])
    return np.array(embeddings, np.float32)


@pytest.mark.parametrize(
    ("given_input", "inputs"),
    [
        ("hello world", [token_ids("hello world")]),
        (["hello", "the cats"], [token_ids("hello"), token_ids("the cats")]),
        ([2, 9, 3], [[2, 9, 3]]),
        ([[2, 9, 3], [7]], [[2, 9, 3], [7]]),
        (["[1, 2]"], [token_ids("[1, 2]")]),
        (
            ["☃ \N{GRINNING FACE}", " ", "\n\x00"],
            [token_ids("☃ \N{GRINNING FACE}"), token_ids(" "), token_ids("\n\x00")],
        ),
    ],
    ids=["text", "texts", "token ids", "lists of token ids", "text that looks like ids", "odd texts"],
)
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_every_form_of_input_in_both_encodings(
    app: App, given_input: object, inputs: list[list[int]], encoding_format: str
) -> None:
    response = app.embed(input=given_input, model="tiny", encoding_format=encoding_format, user="someone")
    np.testing.assert_array_equal(vectors_of(response), expected_vectors(inputs))
    content = response.json()
    assert set(content) == {"object", "data", "model", "usage"}
    assert (content["object"], content["model"]) == ("list", "tiny")
    num_tokens = sum(map(len, inputs))
    assert content["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert response.headers["content-type"] == "application/json"
    assert "x-truncated-inputs" not in response.headers


def test_the_encoding_is_float_unless_asked_otherwise(app: App) -> None:
    embedding = app.embed(input="a").json()["data"][0]["embedding"]
    assert all(isinstance(value, float) for value in embedding)


@pytest.mark.parametrize("dimensions", [1, 3, 8])
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_dimensions_shorten_the_vectors_to_unit_length(app: App, dimensions: int, encoding_format: str) -> None:
    vectors = vectors_of(app.embed(input=["a", "cats"], dimensions=dimensions, encoding_format=encoding_format))
    expected = expected_vectors([token_ids("a"), token_ids("cats")], dimensions)
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)


def test_null_stands_for_an_optional_field_left_out(app: App) -> None:
    assert app.embed(input="a", model=None, dimensions=None, user=None).json() == app.embed(input="a").json()


def test_unknown_fields_are_ignored_as_gateways_add_their_own(app: App) -> None:
    assert app.embed(input="a", x_gateway={"deep": [1, {"er": None}]}).status_code == 200


def test_of_duplicate_keys_the_last_one_counts(app: App) -> None:
    response = app.post(b'{"input": "a", "input": "cats", "input": "b"}')
    np.testing.assert_array_equal(vectors_of(response), expected_vectors([token_ids("b")]))


def test_blanks_around_the_input_do_not_matter(app: App) -> None:
    response = app.post(b' {\n "input" : \t[ \r\n[ 5 ] , [ 6,7 ] ]\n}\n ')
    np.testing.assert_array_equal(vectors_of(response), expected_vectors([[5], [6, 7]]))


def test_a_body_in_chunks_is_a_body(app: App) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for byte in b'{"input": "cats"}':
            yield bytes([byte])

    np.testing.assert_array_equal(vectors_of(app.post(chunks())), expected_vectors([token_ids("cats")]))


def test_truncated_inputs_are_named_in_a_header(app: App) -> None:
    response = app.embed(input=["a", "a " * 99, "b", "b " * 99])
    assert response.headers["x-truncated-inputs"] == "1,3"
    assert response.json()["usage"]["prompt_tokens"] == 3 + 16 + 3 + 16


def test_as_many_inputs_as_allowed_come_back_in_order(app: App) -> None:
    inputs = [[index, index] for index in range(32)]
    np.testing.assert_array_equal(vectors_of(app.embed(input=inputs)), expected_vectors(inputs))


def test_the_default_prompt_is_for_texts_only(tmp_path_factory: pytest.TempPathFactory, make_app: MakeApp) -> None:
    folder = tmp_path_factory.mktemp("prompted") / "artifact"
    prompted = save_artifact(folder, name="prompted", prompts={"query": "query: "}, default_prompt_name="query")
    engine = FakeEngine(LIMITS)
    app = make_app(FakeEngine(LIMITS), (prompted, engine))
    app.embed(input="cat", model="prompted")
    app.embed(input=[9], model="prompted")
    assert [sequences_of(batch) for batch in engine.batches] == [[token_ids("query: cat")], [[9]]]


def test_models_are_routed_by_name(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    first, second = app.embed(input=[5, 6], model="tiny"), app.embed(input=[5, 6], model="org/second")
    np.testing.assert_array_equal(vectors_of(first), expected_vectors([[5, 6]]))
    np.testing.assert_array_equal(vectors_of(second), expected_vectors([[5, 6]], normalize=False))
    assert [first.json()["model"], second.json()["model"]] == ["tiny", "org/second"]


def test_where_several_models_are_served_one_must_be_named(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    check_error(app.embed(input="a"), 400, "set model to one of tiny, org/second", param="model")


# When the service cannot answer


def test_a_full_queue_is_429_with_a_time_to_come_back(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine, max_queue_tokens=3)

    async def overload() -> tuple[httpx.Response, httpx.Response]:
        first = asyncio.ensure_future(app.client.post(ROUTE, content=b'{"input": "a"}'))
        await app.loop.run_in_executor(None, engine.wait_entered)
        second = await app.client.post(ROUTE, content=b'{"input": "b"}')
        engine.open()
        return await first, second

    answered, refused = app.run(overload())
    assert answered.status_code == 200
    check_error(refused, 429, "retry in", type="rate_limit_error", code="overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert 1 <= int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
    assert app.embed(input="c").status_code == 200


def test_a_draining_server_answers_503_and_closes_the_connection(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    app.models.begin_drain()
    response = app.embed(input="a")
    check_error(response, 503, "another replica", type="server_error", code="shutting_down")
    assert response.headers["connection"] == "close"


def test_an_engine_failure_is_500_without_its_details(make_app: MakeApp) -> None:
    app = make_app(PickyEngine(LIMITS, lambda sequence: 99 in sequence))
    message = check_error(app.embed(input=[99]), 500, type="server_error", code="engine_failed")
    assert "poison" not in message
    assert app.embed(input=[98]).status_code == 200


def test_a_vector_of_nan_is_500_and_no_vector(make_app: MakeApp) -> None:
    app = make_app(NaNEngine(LIMITS, 99))
    check_error(app.embed(input=[[98], [99]]), 500, "not a finite vector", code="non_finite_output")
    assert app.embed(input=[98]).status_code == 200


# The parser alone


@given(
    st.lists(st.lists(st.integers(0, 2**70), max_size=5), min_size=1, max_size=5), st.sampled_from(["", " ", "\n\t"])
)
def test_lists_of_token_ids_are_parsed_with_any_blanks(inputs: list[list[int]], blank: str) -> None:
    raw = str(inputs).replace(" ", blank).replace("[", f"[{blank}").encode()
    assert parse_input(blank.encode() + raw) == inputs


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    for parse in (parse_request, parse_input):
        try:
            parse(body)
        except InvalidRequestError:
            continue


def test_the_largest_token_id_is_accepted(app: App) -> None:
    assert app.embed(input=[0, VOCAB_SIZE - 1]).status_code == 200


@given(indices=st.sets(st.integers(0, 300)).map(sorted))
def test_the_header_s_ranges_give_the_indices_back(indices: list[int]) -> None:
    found: list[int] = []
    for part in filter(None, index_ranges(indices).split(",")):
        if part != "...":
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    assert found == indices[: len(found)]
    assert (len(found) < len(indices)) == index_ranges(indices).endswith("...")


def test_the_header_stays_small_whatever_was_cut() -> None:
    assert index_ranges(list(range(2048))) == "0-2047"
    assert len(index_ranges(list(range(0, 2048, 2)))) < 1000
