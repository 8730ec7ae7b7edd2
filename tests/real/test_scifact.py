"""The arithmetic of the retrieval benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scifact import ndcg, rank


def test_a_perfect_ranking_has_an_ndcg_of_one_and_a_useless_one_of_zero() -> None:
    relevance = [{"a": 1, "b": 1}, {"c": 1}]
    assert ndcg([[0, 1, 2], [2, 0, 1]], ["a", "b", "c"], relevance) == pytest.approx(1.0)
    assert ndcg([[2], [0]], ["a", "b", "c"], relevance) == 0.0


def test_a_document_found_later_counts_for_less() -> None:
    assert ndcg([[1, 0]], ["a", "b"], [{"a": 1}]) == pytest.approx(1 / np.log2(3))


def test_the_nearest_documents_come_first_and_ten_at_most() -> None:
    documents = np.eye(12, dtype=np.float32)
    query = np.linspace(1, 0, 12, dtype=np.float32)[None]
    assert rank(query, documents) == [list(range(10))]
