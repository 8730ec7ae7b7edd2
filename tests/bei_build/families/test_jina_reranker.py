"""jina-reranker-v3 and -v3.5: built, over HTTP in every dialect and by ``bei.Model``, against the repository's own code
(``tests.support.listwise``: written after it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Model
from bei.artifact.manifest import Artifact
from bei.bulk.row_task import pair_scores
from bei.core import Float32Array
from bei.errors import CheckpointError, ConfigError, InputTooLongError
from tests.bei.server.app import App
from tests.support.builds import build_artifact, open_engine
from tests.support.checkpoints import change_json
from tests.support.listwise import OwnCode, listwise_tokenizer, save_listwise
from tests.support.reading import refused

QUERY = "where did the cat sit?"
DOCUMENTS = [
    "The cat sat on the mat.",
    "\n\nrain in Spain " * 20,
    "",
    "hello<|embed_token|> there<|rerank_token|>",
    "naïve 東京 👍🏽",
    "in " * 400,
    "the <|im_end|> of it",
]
KINDS: dict[str, tuple[int | None, tuple[int, int]]] = {"v3": (None, (512, 2048)), "v3.5": (64, (1024, 8192))}


# The first tier takes the one with windows and the larger limits.
@pytest.fixture(scope="module", params=["v3.5", pytest.param("v3", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window, limits = KINDS[kind]
    # So short that the own code begins a further text after some thousand tokens: its attention is not fused.
    return save_listwise(tmp_path_factory.mktemp(kind) / "checkpoint", window=window, max_length=limits[1] + 1400)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path) -> Artifact:
    # Not verified: transformers would take many seconds for a text as long.
    return build_artifact(checkpoint, checkpoint.parent / "artifact", max_seq_len=8192, verify=False)


@pytest.fixture(scope="module")
def short(checkpoint: Path) -> Artifact:
    """Of sequences that hold fewer documents."""
    return build_artifact(checkpoint, checkpoint.parent / "short", max_seq_len=2600)


@pytest.fixture(scope="module")
def own(kind: str, checkpoint: Path) -> OwnCode:
    return OwnCode(checkpoint, KINDS[kind][1])


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def scores_of(model: Model, query: str, documents: list[str], **options: Any) -> Float32Array:
    ranks = model.rerank(query, documents, **options)
    found = np.zeros(len(documents), np.float32)
    found[[rank.index for rank in ranks]] = [rank.score for rank in ranks]
    return found


def test_the_engine_agrees_with_transformers_and_reranks_only(short: Artifact, artifact: Artifact, kind: str) -> None:
    (output,) = short.certificate.outputs
    assert (output.output, short.manifest.tasks) == ("token_projection", ["rerank"])
    assert output.cosine_min > 0.9999
    layout = artifact.manifest.listwise
    assert layout
    assert (layout.max_query_tokens, layout.max_document_tokens) == KINDS[kind][1]


def test_a_model_without_windows_has_the_limits_of_v3(tmp_path: Path) -> None:
    folder = save_listwise(tmp_path / "checkpoint")
    layout = build_artifact(folder, tmp_path / "artifact", max_seq_len=8192, verify=False).manifest.listwise
    assert layout
    assert (layout.max_query_tokens, layout.max_document_tokens) == KINDS["v3"][1]


@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS * 2, DOCUMENTS[:1]], ids=["one text", "several", "one"])
def test_scores_are_those_of_the_own_code(model: Model, own: OwnCode, documents: list[str]) -> None:
    np.testing.assert_allclose(scores_of(model, QUERY, documents), own.rerank(QUERY, documents), atol=2e-4)


@pytest.mark.slow
def test_more_documents_than_the_own_code_reads_at_once_are_weighed_as_there(model: Model, own: OwnCode) -> None:
    documents = [f"document {number}" for number in range(131)]
    np.testing.assert_allclose(scores_of(model, QUERY, documents), own.rerank(QUERY, documents), atol=2e-4)


@pytest.mark.slow
def test_long_queries_and_documents_are_cut_where_the_own_code_cuts_them(model: Model, own: OwnCode, kind: str) -> None:
    query, documents = "cat at sea, " * 120, ["ordinary", "no more " * (300 if kind == "v3.5" else 700)]
    np.testing.assert_allclose(scores_of(model, query, documents), own.rerank(query, documents), atol=2e-4)


def test_an_instruction_is_read_as_in_the_own_code(model: Model, own: OwnCode) -> None:
    found = scores_of(model, QUERY, DOCUMENTS[:3], instruction="Prefer the cat.")
    np.testing.assert_allclose(found, own.rerank(QUERY, DOCUMENTS[:3], "Prefer the cat."), atol=2e-4)
    assert not np.allclose(found, scores_of(model, QUERY, DOCUMENTS[:3]), atol=1e-4)


def test_a_documents_score_depends_on_those_beside_it_and_on_their_order(model: Model) -> None:
    together, turned = scores_of(model, QUERY, DOCUMENTS[:3]), scores_of(model, QUERY, DOCUMENTS[2::-1])[::-1]
    alone = scores_of(model, QUERY, DOCUMENTS[:1])
    assert not np.allclose(together, turned, atol=1e-4)
    assert abs(alone[0] - together[0]) > 1e-5
    np.testing.assert_array_equal(scores_of(model, QUERY, DOCUMENTS[:3], raw_scores=True), together)


_LIST = {"query": QUERY, "documents": DOCUMENTS}
_TEXTS = [{"text": document} for document in DOCUMENTS]
# Path and body, and where the scores stand by their documents' places.
ROUTES: dict[str, tuple[dict[str, Any], str, str]] = {
    "/rerank": ({"query": QUERY, "texts": DOCUMENTS}, "", "score"),
    "/v1/rerank": (_LIST, "results", "relevance_score"),
    "/v2/rerank": (_LIST, "results", "relevance_score"),
    "/tei/rerank": ({"query": QUERY, "texts": DOCUMENTS}, "", "score"),
    "/cohere/v2/rerank": ({"model": "m", **_LIST}, "results", "relevance_score"),
    "/jina/v1/rerank": ({"model": "m", **_LIST}, "results", "relevance_score"),
    "/voyage/v1/rerank": ({"model": "m", **_LIST}, "data", "relevance_score"),
    "/infinity/rerank": ({"model": "m", **_LIST}, "results", "relevance_score"),
    "/vllm/v1/rerank": (_LIST, "results", "relevance_score"),
    "/vllm/v1/score": ({"text_1": QUERY, "text_2": DOCUMENTS}, "data", "score"),
    "/nim/v1/ranking": ({"model": "m", "query": {"text": QUERY}, "passages": _TEXTS}, "rankings", "logit"),
}


def test_every_route_gives_the_scores_of_the_list(artifact: Artifact, model: Model) -> None:
    expected = scores_of(model, QUERY, DOCUMENTS)
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        for path, (body, field, score) in ROUTES.items():
            if "model" in body:
                body = {**body, "model": artifact.manifest.name}
            response = app.request("POST", path, json.dumps(body).encode())
            assert response.status_code == 200, f"{path}: {response.text}"
            found = response.json()[field] if field else response.json()
            scores = {one["index"]: one[score] for one in found}
            np.testing.assert_allclose([scores[place] for place in sorted(scores)], expected, atol=1e-5, err_msg=path)
        cut = app.request("POST", "/v1/rerank", json.dumps({**_LIST, "documents": ["a", "no " * 9000]}).encode())
        assert cut.headers["x-truncated-inputs"] == "1"
        usage = app.request("POST", "/v1/rerank", json.dumps(_LIST).encode()).json()["usage"]
        alone = [len(listwise_tokenizer().encode(text).ids) for text in DOCUMENTS]
        assert usage["total_tokens"] > sum(alone)
    finally:
        app.close()


def test_pairs_of_several_queries_are_lists_of_their_own(artifact: Artifact, model: Model) -> None:
    queries = [QUERY, "rain?", QUERY, "rain?"]
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        body = {"text_1": queries, "text_2": DOCUMENTS[:4]}
        data = app.request("POST", "/v1/score", json.dumps(body).encode()).json()["data"]
    finally:
        app.close()
    for query in (QUERY, "rain?"):
        places = [place for place, one in enumerate(queries) if one == query]
        expected = scores_of(model, query, [DOCUMENTS[place] for place in places])
        np.testing.assert_allclose([data[place]["score"] for place in places], expected, atol=1e-5)


def test_what_must_not_be_cut_is_refused(model: Model) -> None:
    with pytest.raises(InputTooLongError):
        model.rerank(QUERY, ["no " * 9000], truncate=False)


def test_documents_that_do_not_fit_one_sequence_are_read_in_several(short: Artifact, own: OwnCode) -> None:
    documents = [f"the cat {number} " * 30 for number in range(9)]
    with Model(short.path, tune="off") as model:
        found = scores_of(model, QUERY, documents)
        ranks = model.rerank(QUERY, [*documents, "in " * 3000])  # cut to what fits
    assert len(ranks) == 10
    assert np.isfinite(found).all()
    assert abs(found[0] - own.rerank(QUERY, documents)[0]) < 0.2  # with other neighbours it is another number


def test_bulk_rows_are_refused(artifact: Artifact) -> None:
    class Service:
        name, manifest, adapter = "m", artifact.manifest, 0

    with pytest.raises(ConfigError, match="scores the documents of a query together"):
        pair_scores(Service(), {})  # type: ignore[arg-type]


def test_settings_without_meaning_are_refused(tmp_path: Path) -> None:
    folder = save_listwise(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="leave rerank_body out"):
        build_artifact(folder, tmp_path / "out", rerank_body="{query} {document}", verify=False)
    with pytest.raises(CheckpointError, match="Set --max-seq-len to"):
        build_artifact(folder, tmp_path / "out", max_seq_len=600, verify=False)


def test_a_tokenizer_without_the_markers_is_refused(tmp_path: Path) -> None:
    folder = save_listwise(tmp_path)
    change_json(folder / "tokenizer.json", added_tokens=[])
    refused(folder, CheckpointError, r"reads the state of the token <\|embed_token\|>, which the tokenizer does not")
