"""Scores by several kinds of vectors: as FlagEmbedding computes BGE-M3's, and as ColBERT sums those of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from bei.errors import InvalidRequestError, TaskNotSupportedError
from bei.offline.model import Model
from tests.bei_build.checkpoint.test_sentence_transformers_outputs import bge_m3
from tests.support.builds import build_artifact

QUERY = "the cats hello world"
DOCUMENTS = ["the cats", "hello hello world the", "world", "a cat in the world of cats, hello!", "the cats hello world"]
TOLERANCE = 2e-4


class Reference:
    """``M3Embedder.compute_score`` of FlagEmbedding 1.4.2 for one pair at a time, so without padding."""

    def __init__(self, folder: Path, sparse: torch.nn.Linear, colbert: torch.nn.Linear) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self._sparse, self._colbert = sparse, colbert

    @torch.no_grad()
    def _read(self, text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.tensor([self._tokenizer(text)["input_ids"]])
        states = self._model(ids).last_hidden_state[0]
        weights = torch.relu(self._sparse(states))[:, 0]
        vocabulary = torch.zeros(self._model.config.vocab_size)
        vocabulary = vocabulary.scatter_reduce(0, ids[0], weights, "amax", include_self=False)
        tokenizer = self._tokenizer
        unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
        vocabulary[sorted(one for one in unused if one is not None)] = 0
        normalize = torch.nn.functional.normalize
        return normalize(states[0], dim=-1), vocabulary, normalize(self._colbert(states[1:]), dim=-1)

    def scores(self, query: str, document: str, weights: tuple[float, float, float] = (1, 1, 1)) -> dict[str, float]:
        first, second = self._read(query), self._read(document)
        dense, sparse = float(first[0] @ second[0]), float(first[1] @ second[1])
        colbert = float((first[2] @ second[2].T).max(-1).values.sum() / len(first[2]))
        kinds = (dense, sparse, colbert)
        total = sum(weight * kind for weight, kind in zip(weights, kinds, strict=True)) / sum(weights)
        return {"dense": dense, "sparse": sparse, "multi_vector": colbert, "hybrid": total}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Reference]]:
    folder = tmp_path_factory.mktemp("m3")
    layers = bge_m3(folder / "checkpoint")
    artifact = build_artifact(folder / "checkpoint", folder / "artifact")
    with Model(artifact.path) as model:
        yield model, Reference(folder / "checkpoint", *layers)


def scores_of(model: Model, **options: Any) -> list[float]:
    ranks = model.rerank(QUERY, DOCUMENTS, **options)
    assert [rank.score for rank in ranks] == sorted((rank.score for rank in ranks), reverse=True)
    return [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]


@pytest.mark.parametrize("mode", ["dense", "sparse", "multi_vector", "hybrid"])
def test_each_mode_is_what_the_library_computes(mode: str, both: tuple[Model, Reference]) -> None:
    model, reference = both
    expected = [reference.scores(QUERY, document)[mode] for document in DOCUMENTS]
    np.testing.assert_allclose(scores_of(model, score_mode=mode), expected, atol=TOLERANCE)


@pytest.mark.parametrize("weights", [(0.4, 0.2, 0.4), (1.0, 0.3, 0.0), (0.0, 0.0, 2.0)])
def test_hybrid_weighs_as_the_library_does(weights: tuple[float, float, float], both: tuple[Model, Reference]) -> None:
    model, reference = both
    expected = [reference.scores(QUERY, document, weights)["hybrid"] for document in DOCUMENTS]
    asked = dict(zip(("dense", "sparse", "multi_vector"), weights, strict=True))
    np.testing.assert_allclose(scores_of(model, score_mode="hybrid", score_weights=asked), expected, atol=TOLERANCE)


def test_stored_token_vectors_are_compared_as_the_texts_are(both: tuple[Model, Reference]) -> None:
    model, _ = both
    queries, documents = model.embed_all([QUERY, "cats"]), model.embed_all(DOCUMENTS)
    found = model.similarity(queries, documents)
    assert found.shape == (2, len(DOCUMENTS))
    np.testing.assert_allclose(found[0], scores_of(model, score_mode="multi_vector"), atol=1e-6)
    np.testing.assert_array_equal(model.similarity_pairwise(queries, documents[:2]), found[[0, 1], [0, 1]])
    with pytest.raises(InvalidRequestError, match="must be token vectors too"):
        model.similarity(queries, np.ones((2, 20)))
    with pytest.raises(InvalidRequestError, match="components"):
        model.similarity(queries, [np.ones((2, 3), np.float32)])
    with pytest.raises(InvalidRequestError, match="pairs need as many"):
        model.similarity_pairwise(queries, documents)


def test_many_documents_are_compared_in_parts(both: tuple[Model, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores_of(both[0], score_mode="hybrid")
    monkeypatch.setattr("bei.tasks.compare._CHARS_AT_ONCE", 20)
    np.testing.assert_allclose(scores_of(both[0], score_mode="hybrid"), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"score_mode": "dense", "label": "a"}, "label is of a reranker"),
        ({"score_mode": "dense", "raw_scores": True}, "raw_scores is of a reranker"),
        ({"score_mode": "sparse", "score_weights": {"sparse": 1.0}}, "of the score_mode hybrid"),
        ({"score_mode": "hybrid", "score_weights": {"late": 1.0}}, "score_weights names 'late'"),
        ({"score_mode": "hybrid", "score_weights": {"dense": 0.0}}, "one of them above 0"),
        ({"score_mode": "hybrid", "score_weights": {"dense": -1.0, "sparse": 2.0}}, "one of them above 0"),
        ({"score_mode": "colbert"}, "score_mode is not valid"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    options: dict[str, Any], said: str, both: tuple[Model, Reference]
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        both[0].rerank(QUERY, DOCUMENTS, **options)


def test_a_label_needs_a_classifier(both: tuple[Model, Reference]) -> None:
    with pytest.raises(TaskNotSupportedError, match="cannot classify"):
        both[0].rerank(QUERY, DOCUMENTS, label="yes")
