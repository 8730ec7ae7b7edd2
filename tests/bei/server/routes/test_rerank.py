"""``/rerank``, ``/v1/rerank``, ``/v2/rerank`` in every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.manifest import Classification
from bei.core import ScoreFunction
from bei.errors import InvalidRequestError
from bei.server.routes.rerank import DocumentsRequest, Result, parse, render_results, text_of
from bei.tasks.classify import Scores
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import answer, expected_output, post, save_kind
from tests.support.artifacts import token_ids

PATHS = ["/rerank", "/v1/rerank", "/v2/rerank"]
QUERY = "cat"
TEXTS = ["world", "the cats", "hello", "a", "b"]


def logits(texts: list[str] = TEXTS, query: str = QUERY) -> list[float]:
    """What the engine answers for each pair."""
    return [float(expected_output("logits", (query, text), 1)[0]) for text in texts]


def probability(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


def best_first(texts: list[str] = TEXTS) -> list[int]:
    values = logits(texts)
    return sorted(range(len(texts)), key=lambda index: (-values[index], index))


def indices_of(results: list[dict[str, Any]]) -> list[int]:
    return [result["index"] for result in results]


# What a cross-encoder's files say of its scores and queries


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("none", probability),
        ("sigmoid", probability),
        ("softmax", probability),
        ("tanh", np.tanh),
        ("relu", lambda logit: max(logit, 0.0)),
        ("softplus", lambda logit: float(np.log1p(np.exp(logit)))),
    ],
)
def test_every_route_puts_the_same_function_on_a_logit(
    function: ScoreFunction, expected: Callable[[float], float], tmp_path: Path
) -> None:
    """Where the checkpoint's function makes no score of a single logit, its sigmoid does; raw scores are logits."""
    told = Classification(labels=["LABEL_0"], function=function)
    prompts = {"query": "the cats ", "other": "a "}
    fields: dict[str, Any] = {"classification": told, "prompts": prompts, "default_prompt_name": "query"}
    app = App(save_kind(tmp_path / "reranker", "reranker", **fields))
    try:
        values = logits(query=f"the cats {QUERY}")
        assert values != logits()
        scores = [expected(value) for value in values]

        def check(found: list[dict[str, Any]], name: str, wanted: list[float], *, ordered: bool = True) -> None:
            order = np.argsort([-value for value in values], kind="stable") if ordered else range(len(values))
            np.testing.assert_allclose([one[name] for one in found], [wanted[index] for index in order], rtol=1e-6)

        for path in PATHS:
            check(answer(app, path, query=QUERY, texts=TEXTS), "score", scores)
            check(answer(app, path, query=QUERY, documents=TEXTS)["results"], "relevance_score", scores)
        for path in ("/rerank", "/tei/rerank"):
            check(answer(app, path, query=QUERY, texts=TEXTS, raw_scores=True), "score", values)
        found = answer(app, "/infinity/rerank", query=QUERY, documents=TEXTS, model="reranker", raw_scores=True)
        check(found["results"], "relevance_score", values)
        for path in ("/cohere/v2/rerank", "/jina/v1/rerank", "/infinity/rerank"):
            found = answer(app, path, query=QUERY, documents=TEXTS, model="reranker")
            check(found["results"], "relevance_score", scores)
        for path in ("/score", "/vllm/score", "/vllm/v1/score"):
            check(answer(app, path, text_1=QUERY, text_2=TEXTS)["data"], "score", scores, ordered=False)
            found = answer(app, path, text_1=QUERY, text_2=TEXTS, use_activation=False)
            check(found["data"], "score", values, ordered=False)
        own = [value if function == "none" else 1.0 if function == "softmax" else expected(value) for value in values]
        pairs = [[QUERY, text] for text in TEXTS]
        found = [best for best, *_ in answer(app, "/predict", inputs=pairs)]
        check(found, "score", own, ordered=False)
        found = [best for best, *_ in answer(app, "/predict", inputs=pairs, raw_scores=True)]
        check(found, "score", values, ordered=False)
    finally:
        app.close()


# texts: TEI and BEI


@pytest.mark.parametrize("path", PATHS)
def test_texts_get_a_bare_list_with_the_best_first(kinds: App, path: str) -> None:
    found = answer(kinds, path, query=QUERY, texts=TEXTS)
    assert indices_of(found) == best_first()
    assert {key for entry in found for key in entry} == {"index", "score"}
    expected = [probability(logits()[index]) for index in best_first()]
    np.testing.assert_allclose([entry["score"] for entry in found], expected, rtol=1e-6)


def test_raw_scores_are_logits(kinds: App) -> None:
    found = answer(kinds, "/rerank", query=QUERY, texts=TEXTS, raw_scores=True)
    assert [entry["score"] for entry in found] == sorted(logits(), reverse=True)


def test_texts_are_returned_where_they_are_asked_for(kinds: App) -> None:
    found = answer(kinds, "/rerank", query=QUERY, texts=TEXTS, return_text=True)
    assert [entry["text"] for entry in found] == [TEXTS[index] for index in best_first()]


def test_what_bei_s_client_sends_is_understood(kinds: App) -> None:
    body = {"raw_scores": True, "return_text": False, "truncate": False, "truncation_direction": "Right"}
    assert len(answer(kinds, "/rerank", query=QUERY, texts=TEXTS, **body)) == len(TEXTS)


# documents: Cohere, Jina, vLLM, LiteLLM, Infinity


@pytest.mark.parametrize("path", PATHS)
def test_documents_get_results_with_a_relevance_score(kinds: App, path: str) -> None:
    found = answer(kinds, path, query=QUERY, documents=TEXTS, model="reranker")
    assert indices_of(found["results"]) == best_first()
    expected = [probability(logits()[index]) for index in best_first()]
    np.testing.assert_allclose([result["relevance_score"] for result in found["results"]], expected, rtol=1e-6)
    assert found["model"] == "reranker"
    assert found["object"] == ("rerank" if path == "/rerank" else "list")
    assert found["id"].startswith("rerank-")
    num_tokens = sum(len(token_ids(QUERY)) + len(token_ids(text)) - 1 for text in TEXTS)
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    version = "2" if path == "/v2/rerank" else "1"
    assert found["meta"] == {"api_version": {"version": version}, "billed_units": {"search_units": 1}}


@pytest.mark.parametrize("field", ["documents", "texts"])
def test_as_many_documents_as_a_request_may_have_are_ranked_in_batches(tmp_path: Path, field: str) -> None:
    """Far more than a batch, a queue's wait or the interactive lane holds: an idle server takes them all the same."""
    app = App(save_kind(tmp_path / "reranker", "reranker"), max_client_batch_size=500, interactive_max_wait=1e-9)
    try:
        documents = [f"{'cat ' * (index % 7)}{index % 10}" for index in range(500)]
        for _ in range(2):
            found = answer(app, "/rerank", query=QUERY, **{field: documents})
            results = found if field == "texts" else found["results"]
            assert indices_of(results) == best_first(documents)
        check_error(post(app, "/rerank", query=QUERY, **{field: [*documents, "a"]}), 400, "has 501 inputs", param=field)
    finally:
        app.close()


@pytest.mark.parametrize(("top_n", "length"), [(None, 5), (0, 5), (1, 1), (4, 4), (99, 5)])
def test_top_n_keeps_the_best(kinds: App, top_n: int | None, length: int) -> None:
    found = answer(kinds, "/rerank", query=QUERY, documents=TEXTS, top_n=top_n)
    assert indices_of(found["results"]) == best_first()[:length]


@pytest.mark.parametrize(
    ("path", "fields", "document"),
    [
        ("/rerank", {}, {"text": "world"}),
        ("/rerank", {"return_documents": True}, {"text": "world"}),
        ("/rerank", {"return_documents": False}, None),
        ("/rerank", {"raw_scores": False}, None),
        ("/rerank", {"raw_scores": False, "return_documents": True}, "world"),
        ("/v1/rerank", {}, {"text": "world"}),
        ("/v1/rerank", {"return_documents": True}, {"text": "world"}),
        ("/v1/rerank", {"return_documents": False}, None),
        ("/v2/rerank", {}, None),
        ("/v2/rerank", {"return_documents": True}, {"text": "world"}),
    ],
)
def test_a_result_has_its_document_in_the_form_of_the_dialect(
    kinds: App, path: str, fields: dict[str, bool], document: object
) -> None:
    (result,) = answer(kinds, path, query=QUERY, documents=["world"], **fields)["results"]
    assert result.get("document") == document
    assert ("document" in result) == (document is not None)


def test_documents_may_be_objects_whose_fields_are_named(kinds: App) -> None:
    documents = ["world", {"text": "the cats", "title": "x"}, {"text": "hello"}]
    found = answer(kinds, "/v1/rerank", query=QUERY, documents=documents)
    assert indices_of(found["results"]) == best_first(["world", "the cats", "hello"])
    objects = [{"title": "the", "text": "cats"}, {"title": "hello", "text": "x"}]
    named = answer(kinds, "/v1/rerank", query=QUERY, documents=objects, rank_fields=["title"])
    assert sorted(result["document"]["text"] for result in named["results"]) == ["hello", "the"]


@pytest.mark.parametrize(
    "image",
    [
        {"image": "data:image/png;base64,AA=="},
        {"image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_base64", "image_base64": "AA=="},
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
    ],
    ids=lambda image: [*image][-1],
)
@pytest.mark.parametrize("path", PATHS)
def test_an_image_beside_a_text_is_not_left_out(kinds: App, path: str, image: dict[str, Any]) -> None:
    documents = ["world", {"text": "the cats", **image}]
    message = "has text beside content" if "content" in image else "reads no images in pairs"
    check_error(post(kinds, path, query=QUERY, documents=documents), 400, message)
    check_error(post(kinds, path, query=documents[1], documents=["a"]), 400, message)
    asked = {"query": QUERY, "documents": documents[1:], "rank_fields": ["text"]}
    plain = answer(kinds, path, query=QUERY, documents=["the cats"])["results"]
    assert answer(kinds, path, **asked)["results"] == plain
    about = {"text": "the cats", "image": None, "url": "https://example.com", "content": "a text", "bytes": 12}
    assert answer(kinds, path, query=QUERY, documents=[about])["results"] == plain


@pytest.mark.parametrize(
    ("rank_fields", "said"), [(["a", "b", "a"], "'a' twice"), ([*map(str, range(300)), "a"], "too many")]
)
def test_rank_fields_by_the_thousand_are_refused(rank_fields: list[str], said: str) -> None:
    """One of 4 MB of fields was 32 GB of texts, each of the same field as often as it stood there."""
    body = {"query": QUERY, "documents": [{"a": "x"}] * 16_384, "rank_fields": rank_fields}
    with pytest.raises(InvalidRequestError, match=said) as refused:
        parse(json.dumps(body).encode(), 16_384)
    assert refused.value.param == "rank_fields"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("document", "rank_fields"),
    [
        ('{"text": "a", "text": "b"}', None),
        ('{"te\\u0078t": "a", "text": "b"}', ["text"]),
        ('{"image": "data:,", "image": "b"}', None),
        ('{"text": "a", "of": {"text": 1, "text": 2}}', None),
    ],
)
def test_a_document_with_a_key_twice_is_refused(
    kinds: App, path: str, document: str, rank_fields: list[str] | None
) -> None:
    fields = json.dumps(rank_fields)
    body = f'{{"query": "a", "documents": ["x", {document}], "rank_fields": {fields}}}'
    key = "image" if "image" in document else "text"
    check_error(kinds.request("POST", path, body.encode()), 400, f"documents 1 has the key '{key}' twice")


def test_rank_fields_do_nothing_to_plain_texts(kinds: App) -> None:
    plain = answer(kinds, "/v1/rerank", query=QUERY, documents=TEXTS)["results"]
    assert answer(kinds, "/v1/rerank", query=QUERY, documents=TEXTS, rank_fields=["title"])["results"] == plain


@pytest.mark.parametrize("documents", [[{"title": "a"}], [{"text": 1}], [{}], ["a", {"text": None}]])
def test_an_object_without_its_text_is_refused_with_the_names_it_may_have(kinds: App, documents: object) -> None:
    check_error(post(kinds, "/rerank", query="a", documents=documents), 400, "in text", param="documents")


def test_documents_are_cut_to_their_own_limit_and_named(kinds: App) -> None:
    """Special tokens are not of a document, as in vLLM; two of its tokens went to them."""
    response = post(kinds, "/v2/rerank", query=QUERY, documents=["hello", "the the the cat cat"], max_tokens_per_doc=3)
    assert response.headers["x-truncated-inputs"] == "1"
    uncut = answer(kinds, "/v2/rerank", query=QUERY, documents=["hello", "the the the"])
    assert response.json()["results"] == uncut["results"]
    assert response.json()["usage"] == uncut["usage"]


def test_a_limit_beyond_the_model_s_is_none(kinds: App) -> None:
    response = post(kinds, "/v2/rerank", query=QUERY, documents=TEXTS, max_tokens_per_doc=4096)
    assert response.status_code == 200
    assert "x-truncated-inputs" not in response.headers


def test_a_search_unit_is_a_hundred_documents() -> None:
    def units(num_documents: int) -> Any:
        scores = Scores([1], [], values=np.zeros((num_documents, 1), np.float32), labels=["score"])
        body = DocumentsRequest(query="q", documents=[])
        rendered: Any = render_results(scores, ["a"] * num_documents, body, "m", "/rerank")
        return rendered["meta"]["billed_units"]["search_units"]

    assert [units(count) for count in (1, 100, 101, 250)] == [1, 1, 2, 3]


def test_vllm_s_word_for_raw_scores(kinds: App) -> None:
    results: list[Result] = answer(kinds, "/rerank", query=QUERY, documents=TEXTS, use_activation=False)["results"]
    assert [result["relevance_score"] for result in results] == sorted(logits(), reverse=True)


def test_equal_scores_stay_in_order(kinds: App) -> None:
    assert indices_of(answer(kinds, "/rerank", query=QUERY, texts=["a", "a", "a"])) == [0, 1, 2]


def test_the_longer_side_is_cut_and_the_pair_named(kinds: App) -> None:
    response = post(kinds, "/rerank", query=QUERY, texts=["a", "b " * 40])
    assert response.headers["x-truncated-inputs"] == "1"
    check_error(post(kinds, "/rerank", query=QUERY, texts=["b " * 40], truncate=False), 400, "allow truncation")


# Errors


@pytest.mark.parametrize("path", PATHS)
def test_a_body_has_texts_or_documents(kinds: App, path: str) -> None:
    first, second = ("texts", "documents") if path == "/rerank" else ("documents", "texts")
    message = f"exactly one of the fields {first}, {second}; it has "
    check_error(post(kinds, path, query="a"), 400, f"{message}none of them", param=first)
    check_error(post(kinds, path, query="a", texts=["a"], documents=["a"]), 400, f"{message}{first}, {second}")
    check_error(post(kinds, path, query="a", texts=None, documents=None), 400, "none of them")
    assert answer(kinds, path, query="a", texts=None, documents=["a"])["results"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": ["a"] * 9}, "texts"),
        ({"texts": ["a"], "query": None}, "query"),
        ({"texts": "a"}, "texts"),
        ({"texts": [1]}, "texts"),
        ({"texts": ["a"], "instruction": "be kind"}, "instruction"),
        ({"texts": ["a"], "instruct": "be kind"}, "instruction"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", None]}, "documents"),
        ({"documents": ["a"] * 9}, "documents"),
        ({"documents": ["a"], "top_n": -1}, "top_n"),
        ({"documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"documents": [[]]}, "documents"),
    ],
)
def test_a_wrong_field_is_blamed(kinds: App, fields: dict[str, object], param: str) -> None:
    check_error(post(kinds, "/rerank", **{"query": "a", **fields}), 400, param=param)


# Laws


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=9), st.integers(0, 12))
def test_results_are_the_best_of_all_in_order(values: list[float], top_n: int) -> None:
    scores = Scores([1], [], values=np.array(values, np.float32)[:, None], labels=["score"])
    texts = [str(index) for index in range(len(values))]
    body = DocumentsRequest(query="q", documents=[], top_n=top_n)
    rendered: Any = render_results(scores, texts, body, "m", "/rerank")["results"]
    results = rendered.make(0, rendered.count)
    found = [float(result["relevance_score"]) for result in results]
    assert found == sorted(values, reverse=True)[: top_n or None]
    assert all(values[result["index"]] == float(result["relevance_score"]) for result in results)
    assert all(result["document"] == {"text": str(result["index"])} for result in results)


@given(st.lists(st.text(max_size=5)), st.lists(st.text(max_size=3)))
def test_plain_texts_are_their_own_texts(texts: list[str], rank_fields: list[str]) -> None:
    assert [text_of(0, text, rank_fields) for text in texts] == texts
    assert [text_of(0, {"text": text}, None) for text in texts] == texts
