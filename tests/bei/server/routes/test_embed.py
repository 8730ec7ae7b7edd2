"""``/embed``, ``/embed_all``, ``/embed_sparse``, ``/similarity``: what good requests get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.engine.fake import FakeEngine
from bei.engine.postprocess import unit_length
from bei.errors import InvalidRequestError
from bei.server.routes.embed import inputs_of, parse_request
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import (
    MARK,
    PROMPTS,
    TOKEN_DIMENSION,
    answer,
    expected_output,
    fake_output,
    post,
    save_kind,
)
from tests.support.artifacts import LIMITS, VOCAB_SIZE, expected_vectors, token_ids


@pytest.mark.parametrize(
    ("inputs", "ids"),
    [
        ("hello world", [token_ids("hello world")]),
        (["hello", "the cats"], [token_ids("hello"), token_ids("the cats")]),
        ([2, 9, 3], [[2, 9, 3]]),
        ([[2, 9, 3], [7]], [[2, 9, 3], [7]]),
        ([[2, 9], "hello", [7], "cat"], [[2, 9], token_ids("hello"), [7], token_ids("cat")]),
    ],
    ids=["text", "texts", "token ids", "lists of token ids", "texts and token ids"],
)
def test_every_form_of_inputs_is_answered_with_a_list_of_vectors(
    kinds: App, inputs: object, ids: list[list[int]]
) -> None:
    np.testing.assert_allclose(answer(kinds, "/embed", inputs=inputs), expected_vectors(ids), rtol=1e-6)


def test_vectors_have_unit_length_unless_normalize_is_false(kinds: App) -> None:
    given_inputs = ["cat", [5, 6]]
    ids = [token_ids("cat"), [5, 6]]
    raw = answer(kinds, "/embed", inputs=given_inputs, normalize=False)
    np.testing.assert_allclose(raw, expected_vectors(ids, normalize=False))
    assert answer(kinds, "/embed", inputs=given_inputs, normalize=True) == answer(kinds, "/embed", inputs=given_inputs)


@pytest.mark.parametrize("normalize", [True, False])
def test_dimensions_cut_before_normalizing(kinds: App, normalize: bool) -> None:
    vectors = answer(kinds, "/embed", inputs=["cat", [5, 6]], dimensions=3, normalize=normalize)
    np.testing.assert_allclose(vectors, expected_vectors([token_ids("cat"), [5, 6]], 3, normalize=normalize), rtol=1e-6)


@pytest.mark.parametrize("control", [{"prompt_name": "cats"}, {"input_type": "cats"}])
def test_a_prompt_is_put_in_front_of_texts(kinds: App, control: dict[str, str]) -> None:
    prompted = expected_vectors([token_ids(PROMPTS["cats"] + "hello")])
    np.testing.assert_allclose(answer(kinds, "/embed", inputs="hello", **control), prompted, rtol=1e-6)


def test_a_prompt_may_be_said_itself(kinds: App) -> None:
    for prompt, text in (("the cats ", "the cats hello"), ("query: {text} !", "query: hello !"), ("", "hello")):
        expected = expected_vectors([token_ids(text)])
        response = post(kinds, "/embed", inputs="hello", prompt=prompt)
        np.testing.assert_allclose(response.json(), expected, rtol=1e-6)
        assert "x-bei-warning" not in response.headers
        openai = answer(kinds, "/v1/embeddings", input="hello", prompt=prompt, model="embedder")["data"]
        np.testing.assert_allclose(openai[0]["embedding"], expected[0], rtol=1e-6)
    check_error(post(kinds, "/embed", inputs="a", prompt="x", prompt_name="cats"), 400, param="prompt_name")


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/embed_sparse"])
def test_a_text_that_is_cut_keeps_its_prompt(kinds: App, path: str) -> None:
    text = "a " * 20 + "b " * 20
    left = answer(kinds, path, inputs=text, prompt="cat ", truncation_direction="left")
    assert left == answer(kinds, path, inputs="cat " + "b " * 13, prompt="")
    around = answer(kinds, path, inputs=text, prompt="cat {text} !")
    assert around == answer(kinds, path, inputs="cat " + "a " * 12 + "!", prompt="")


def test_a_prompt_that_the_model_has_not_is_an_error_that_names_those_it_has(kinds: App) -> None:
    check_error(post(kinds, "/embed", inputs="a", prompt_name="x"), 400, "query, cats", param="prompt_name")


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/embed_sparse"])
def test_long_texts_are_cut_at_the_end_that_is_asked_for_and_named(kinds: App, path: str) -> None:
    response = post(kinds, path, inputs=["a", "a " * 20 + "b " * 20])
    assert response.headers["x-truncated-inputs"] == "1"
    right = answer(kinds, path, inputs=["a " * 14])
    left = answer(kinds, path, inputs=["b " * 14])
    assert response.json()[1:] == right
    assert answer(kinds, path, inputs=["a " * 20 + "b " * 20], truncation_direction="Left") == left
    check_error(post(kinds, path, inputs="a " * 40, truncate=False), 400, "allow truncation")


def test_in_a_mixed_list_the_header_counts_all_inputs(kinds: App) -> None:
    response = post(kinds, "/embed", inputs=[[5], "a", [6], "a " * 40])
    assert response.headers["x-truncated-inputs"] == "3"


def test_sparse_vectors_are_lists_of_positive_weights_by_index(kinds: App) -> None:
    expected = [
        [
            {"index": index, "value": value}
            for index, value in enumerate(expected_output("sparse", text, VOCAB_SIZE, "query: ").tolist())
            if value > 0
        ]
        for text in ("cat", "the cats")
    ]
    assert answer(kinds, "/embed_sparse", inputs=["cat", "the cats"], input_type="query") == expected


def test_top_k_leaves_the_largest_weights(kinds: App) -> None:
    everything = answer(kinds, "/embed_sparse", inputs=["cat", "the cats"])
    best = answer(kinds, "/embed_sparse", inputs=["cat", "the cats"], top_k=1)
    assert all(len(entries) > 1 for entries in everything)
    assert best == [[max(entries, key=lambda entry: float(entry["value"]))] for entries in everything]
    check_error(post(kinds, "/embed_sparse", inputs="the cats", top_k=0), 400, ">= 1", param="top_k")


def test_token_vectors_have_unit_length_and_special_tokens_are_there(kinds: App) -> None:
    vectors = answer(kinds, "/embed_all", inputs=["cat", "the cats"])
    for given_text, found in zip(["cat", "the cats"], vectors, strict=True):
        expected = unit_length(expected_output("token_embedding", given_text, TOKEN_DIMENSION))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert len(found) == len(token_ids(given_text))


SIDES = [
    ("the cat", {"input_type": "query"}, [2, 8, 9, 11, 12, 3, MARK, MARK], 6),
    ("the cat", {"prompt_name": "query"}, [2, 8, 9, 11, 12, 3, MARK, MARK], 6),
    ("the cat the cat the cat", {"input_type": "search_query"}, [2, 8, 9, 11, 12, 11, 12, 11, 12, 3], None),
    ("the cat the cat", {"input_type": "query", "truncate_prompt_tokens": 5}, [2, 8, 9, 11, 3] + [MARK] * 3, 5),
    ("cat ! cat the", {"input_type": "document"}, [2, 12, MARK, 12, 3], None),
    ("! !", {"input_type": "passage"}, [2, MARK, MARK, 3], None),
    ("cat ! cat the", {}, [2, 12, MARK, 12, 11, 3], None),
    ("cat !", {"prompt_name": "cats"}, [2, 11, 12, 58, 12, MARK, 3], None),
]


@pytest.mark.parametrize(("text", "controls", "ids", "num_keys"), SIDES)
def test_each_side_of_late_interaction_is_read_and_answered_in_its_own_way(
    text: str, controls: dict[str, object], ids: list[int], num_keys: int | None, tmp_path: Path
) -> None:
    artifact, engine = save_kind(tmp_path / "colbert", "colbert")
    app = App((artifact, engine))
    try:
        (vectors,) = answer(app, "/embed_all", inputs=text, **controls)
    finally:
        app.close()
    batch = engine.batches[-1]
    assert batch.input_ids.tolist() == ids
    assert (None if batch.key_lens is None else batch.key_lens.tolist()) == (num_keys and [num_keys])
    skips = controls.get("input_type") in ("document", "passage")
    kept = np.array([index for index in ids if not (skips and index == MARK)], np.int32)
    expected = unit_length(fake_output("token_embedding", kept, np.zeros_like(kept), TOKEN_DIMENSION))
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)


def test_texts_of_a_side_that_are_cut_are_named(kinds: App) -> None:
    response = post(kinds, "/embed_all", inputs=["cat", "cat cat the the"], input_type="document")
    assert response.headers["x-truncated-inputs"] == "1"
    refused = post(kinds, "/embed_all", inputs=["a b c d"], input_type="document", truncate=False)
    check_error(refused, 400, "more than the 5 tokens it may have: shorten it, or allow truncation")


def test_late_chunking_is_refused_where_the_model_has_no_states_to_pool(kinds: App) -> None:
    response = post(kinds, "/v1/embeddings", input=["a", "b"], late_chunking=True)
    check_error(response, 400, "build it with --token-embeddings", param="late_chunking")
    assert post(kinds, "/v1/embeddings", input=["a", "b"], late_chunking=False).status_code == 200


@pytest.mark.parametrize("field", [{"truncate": True}, {"truncate_prompt_tokens": 4}, {"add_special_tokens": False}])
def test_late_chunking_names_what_it_does_not_do(kinds: App, field: dict[str, object]) -> None:
    (name,) = field
    response = post(kinds, "/v1/embeddings", input=["a", "b"], late_chunking=True, **field)
    check_error(response, 400, "is not supported with late_chunking", param=name)


def test_similarity_is_the_cosine_with_each_sentence_in_order(kinds: App) -> None:
    vectors = expected_vectors([token_ids(text) for text in ("cat", "world", "the cats")])
    inputs = {"source_sentence": "cat", "sentences": ["world", "the cats"]}
    np.testing.assert_allclose(answer(kinds, "/similarity", inputs=inputs), vectors[1:] @ vectors[0], rtol=1e-6)


@pytest.mark.parametrize("where", ["parameters", "beside"])
def test_similarity_takes_its_controls_in_parameters_and_beside_them(kinds: App, where: str) -> None:
    controls = {"prompt_name": "cats", "truncate": True}
    inputs = {"source_sentence": "cat", "sentences": ["world"]}
    found = answer(
        kinds, "/similarity", inputs=inputs, **({"parameters": controls} if where == "parameters" else controls)
    )
    vectors = expected_vectors([token_ids(PROMPTS["cats"] + text) for text in ("cat", "world")])
    np.testing.assert_allclose(found, [vectors[0] @ vectors[1]], rtol=1e-6)


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/embed_sparse"])
@pytest.mark.parametrize("inputs", [None, 7, True, {}, [None], [{}], [1.5], [["a"]], [[[1]]], [1, "a"], ["a", 1]])
def test_inputs_of_no_known_form_are_refused(kinds: App, path: str, inputs: object) -> None:
    check_error(post(kinds, path, inputs=inputs), 400)


@pytest.mark.parametrize("inputs", [[[]], [[5], []], [VOCAB_SIZE], [[-1]], [[1] * 17], [10**30]])
def test_token_ids_that_the_model_does_not_take_are_refused(kinds: App, inputs: object) -> None:
    check_error(post(kinds, "/embed", inputs=inputs), 400)


@pytest.mark.parametrize("inputs", [None, {}, {"source_sentence": "a"}, {"source_sentence": "a", "sentences": "b"}])
def test_similarity_needs_a_source_and_a_list(kinds: App, inputs: object) -> None:
    check_error(post(kinds, "/similarity", inputs=inputs), 400)


@pytest.mark.parametrize("lane", ["interactive", "bulk"])
def test_as_many_sentences_as_a_request_may_have_are_compared_and_never_sent_away_to_come_back(
    make_app: MakeApp, lane: str
) -> None:
    """An idle server takes any request that it may ever take; a larger one is refused for good."""
    sentences = [f"cat {index % 10}" for index in range(64)]
    inputs = {"source_sentence": "cat", "sentences": sentences}
    app = make_app(
        FakeEngine(LIMITS),
        max_client_batch_size=64,
        max_queue_tokens=65 * 4,
        interactive_max_wait=1e-9,
        bulk_max_wait=1e-9,
    )

    def ask() -> Any:
        content = json.dumps({"inputs": inputs}).encode()
        return app.run(app.client.post("/similarity", content=content, headers={"X-Bei-Lane": lane}))

    for _ in range(2):
        assert len(ask().json()) == 64
    inputs["source_sentence"] = "the cat on the mat"
    check_error(ask(), 400, "the limit is 260: split it")


def test_similarity_refuses_empty_texts(kinds: App) -> None:
    no_source = {"source_sentence": "", "sentences": ["a"]}
    check_error(post(kinds, "/similarity", inputs=no_source), 400, "empty text", param="source_sentence")
    no_sentence = {"source_sentence": "a", "sentences": ["b", ""]}
    check_error(post(kinds, "/similarity", inputs=no_sentence), 400, "sentences 1 is an empty text", param="sentences")


_inputs = st.lists(st.text(max_size=3) | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3), max_size=5)


@given(_inputs)
def test_a_list_is_one_input_if_it_has_numbers_only_and_else_has_none(inputs: list[str | int | list[int]]) -> None:
    numbers = [value for value in inputs if isinstance(value, int)]
    content = json.dumps({"inputs": inputs}).encode()
    if numbers and len(numbers) < len(inputs):
        with pytest.raises(InvalidRequestError, match="a list of their own"):
            parse_request(content, 5)
    else:
        assert inputs_of(parse_request(content, 5).inputs) == ([inputs] if numbers else inputs)


@pytest.mark.parametrize(
    ("path", "field", "inputs", "model"),
    [
        ("/embed", "inputs", ["cat"], "embedder"),
        ("/embed_all", "inputs", ["cat"], "colbert"),
        ("/embed_sparse", "inputs", ["cat"], "splade"),
        ("/similarity", "inputs", {"source_sentence": "a", "sentences": ["cat"]}, "embedder"),
        ("/v1/embeddings", "input", ["cat"], "embedder"),
        ("/v2/embed", "texts", ["cat"], "embedder"),
    ],
)
def test_texts_without_a_prompt_for_a_model_with_prompts_are_answered_with_a_warning(
    kinds: App, path: str, field: str, inputs: object, model: str
) -> None:
    body = {field: inputs, "model": model}
    warned = post(kinds, path, **body)
    assert warned.headers["x-bei-warning"] == f"{model} has prompts and got none: say by input_type what the texts are"
    for said in ("query", "document"):
        assert "x-bei-warning" not in post(kinds, path, **body, input_type=said).headers
    if path == "/embed":
        assert "x-bei-warning" not in post(kinds, path, inputs=[[5]], model="embedder").headers


def test_a_name_that_no_model_has_is_answered_where_it_can_only_mean_one(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    for name in ("tei", "text-embeddings-inference"):
        answered = post(app, "/embed", inputs="cat", model=name)
        assert answered.headers["x-bei-warning"] == f"no model is called {name}: tiny has answered"
    check_error(post(app, "/embed", inputs="cat", model="nobody"), 404, code="model_not_found")
