"""nDCG@10 by hand, and by each way in which models rank."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import numpy as np
import pytest

from bei.core import Encoding, EngineInfo, Float32Array, Limits, Outputs, PackedBatch
from bei.verification.engine_answers import Rows
from bei.verification.retrieval import RetrievalQuestions, RetrievalRanking, agreement, ask_retrieval, ndcgs


def asked(*lengths: int, **fields: Any) -> RetrievalQuestions:
    """A query, then documents, of so many tokens; their ids are 0, 1, 2, ..."""
    encodings = [Encoding(np.arange(length, dtype=np.int32)) for length in lengths]
    fields = {"output": "embedding", "num_documents": len(lengths) - 1, "grades": [{0: 2, 2: 1}], **fields}
    return RetrievalQuestions(RetrievalRanking(**fields), encodings)


def rows(*vectors: list[Any]) -> list[Float32Array]:
    return [np.array(vector, np.float32) for vector in vectors]


def ndcg(questions: RetrievalQuestions, found: Rows) -> float:
    return float(np.mean(ndcgs(questions, found)))


# Three documents with grades 2, 0, 1.
BEST = 2 + 1 / math.log2(3)
QUERY = [1.0, 0.0]


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([[3, 0], [1, 9], [2, 0]], 1.0),
        ([[2, 0], [1, 0], [3, 0]], (1 + 2 / math.log2(3)) / BEST),
        ([[1, 0], [3, 0], [2, 0]], (1 / math.log2(3) + 2 / 2) / BEST),
        ([[1, 0], [1, 0], [1, 0]], (2 + 1 / 2) / BEST),  # equal ones stay in order
        ([[1, 0], [1 + 1e-7, 0], [0, 0]], (2 + 1 / 2) / BEST),  # as do nearly equal ones
    ],
    ids=["best", "second first", "worst", "equal", "nearly equal"],
)
def test_ndcg_by_hand(documents: list[list[float]], expected: float) -> None:
    found = ndcg(asked(1, 1, 1, 1), {"embedding": rows(QUERY, *documents)})
    assert found == pytest.approx(expected, abs=1e-5)


def test_only_ten_documents_count() -> None:
    """The one that answers is the eleventh."""
    questions = asked(*[1] * 13, grades=[{11: 1}])
    vectors = [[float(12 - place), 0.0] for place in range(12)]
    vectors[11], vectors[10] = [1.5, 0.0], [0.5, 0.0]
    assert ndcg(questions, {"embedding": rows(QUERY, *vectors)}) == 0.0
    vectors[11] = [3.5, 0.0]
    assert ndcg(questions, {"embedding": rows(QUERY, *vectors)}) == pytest.approx(1 / math.log2(11), abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"similarity": "dot"}, 1),
        ({"similarity": "cosine"}, 0),
        ({"similarity": "dot", "unit_length": True}, 0),
        ({"similarity": "euclidean"}, 2),
        ({"similarity": "manhattan"}, 2),
    ],
)
def test_vectors_are_compared_as_the_model_says(fields: dict[str, Any], first: int) -> None:
    """Document 0 has the query's direction, 1 is long, 2 is near."""
    vectors = rows([1.0, 0.0], [9.0, 0.0], [50.0, 30.0], [1.2, 0.3])
    for document in range(3):
        questions = asked(1, 1, 1, 1, grades=[{document: 1}], **fields)
        assert (ndcg(questions, {"embedding": vectors}) == 1.0) == (document == first)


def test_sparse_weights_below_zero_do_not_count() -> None:
    questions = asked(1, 1, 1, output="sparse", grades=[{1: 1}])
    vectors = rows([-1.0, 1.0, 0.0], [-9.0, 0.0, 1.0], [0.0, 1.0, 0.0])
    assert ndcg(questions, {"sparse": vectors}) == 1.0


def test_late_interaction_adds_the_best_match_of_each_of_the_querys_tokens() -> None:
    """Document 0 matches one token twice, document 1 both once; by means of vectors 0 would win."""
    questions = asked(2, 2, 2, output="token_embedding", grades=[{1: 1}])
    found = rows([[1, 0], [0, 1]], [[1.4, 0], [1.3, 0]], [[0.8, 0], [0, 0.8]])
    assert ndcg(questions, {"token_embedding": found}) == 1.0
    skipping = asked(2, 2, 2, output="token_embedding", grades=[{1: 1}], query_skip_ids=[1])
    assert ndcg(skipping, {"token_embedding": found}) == pytest.approx(1 / math.log2(3), abs=1e-5)
    unit = asked(2, 2, 2, output="token_embedding", grades=[{1: 1}], query_skip_ids=[1], unit_length=True)
    assert ndcg(unit, {"token_embedding": found}) == pytest.approx(1 / math.log2(3), abs=1e-5)  # a tie, by position
    none_left = asked(2, 2, 2, output="token_embedding", grades=[{1: 1}], document_skip_ids=[0, 1])
    assert ndcg(none_left, {"token_embedding": found}) == pytest.approx(1 / math.log2(3), abs=1e-5)


def test_lexical_weights_match_by_token() -> None:
    """Tokens 0 of all are special, and left out; the largest weight of a token counts once."""
    encodings = [Encoding(np.array(ids, np.int32)) for ids in ([0, 5, 6], [0, 5, 5], [0, 6, 7], [0, 8, 9])]
    ranking = RetrievalRanking(
        output="token_weights", num_documents=3, grades=[{1: 1}], query_skip_ids=[0], document_skip_ids=[0]
    )
    found = rows([[9], [1], [1]], [[9], [0.6], [0.5]], [[0], [0.7], [5]], [[9], [1], [1]])
    assert ndcg(RetrievalQuestions(ranking, encodings), {"token_weights": found}) == 1.0


def test_a_rerankers_rows_are_pairs_of_each_querys_candidates() -> None:
    ranking = RetrievalRanking(
        output="logits", num_documents=9, grades=[{4: 1}, {8: 2}], candidates=[[3, 4], [8, 0, 1]]
    )
    questions = RetrievalQuestions(ranking, [Encoding(np.zeros(1, np.int32))] * 5)
    assert ndcg(questions, {"logits": rows([0.1], [0.2], [5.0], [4.0], [3.0])}) == 1.0
    half = ndcg(questions, {"logits": rows([0.2], [0.1], [5.0], [4.0], [3.0])})
    assert half == pytest.approx((1 / math.log2(3) + 1) / 2, abs=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_not_finite_comes_last(value: float) -> None:
    vectors = rows(QUERY, [3, 0], [1, 0], [2, 0])
    vectors[1][1] = value
    expected = (1 / 1 + 2 / 2) / BEST  # documents 2, 1, 0
    assert ndcg(asked(1, 1, 1, 1), {"embedding": vectors}) == pytest.approx(expected, abs=1e-5)


# Agreement.


def made(engine_first: int, num_documents: int = 20, max_loss: float | None = 0.005, reference: float = 1.0) -> Any:
    """An engine that puts document ``engine_first`` first, where 0 is right."""
    questions = asked(*[1] * (num_documents + 1), grades=[{0: 1}])
    vectors = [[0.5 - place / 100, 0.0] for place in range(num_documents)]
    vectors[engine_first] = [1.0, 0.0]
    return agreement(questions, [reference], {"embedding": rows(QUERY, *vectors)}, max_loss)


def test_an_engine_that_ranks_as_well_passes() -> None:
    found = made(0)
    assert (found.ndcg_engine, found.loss, found.is_judged, found.failures) == (1.0, 0.0, True, [])
    assert (found.output, found.num_queries, found.num_documents) == ("embedding", 1, 20)


def test_a_loss_of_more_than_is_allowed_is_a_failure_with_figures() -> None:
    found = made(3)
    assert found.loss == pytest.approx(1 - 1 / math.log2(3), abs=1e-5)
    (failure,) = found.failures
    assert failure == (
        "nDCG@10 0.63093 is 36.91% (standard error 0.00%) below the reference's 1.00000, and at most 0.50% is allowed"
    )
    assert made(3, max_loss=0.4).failures == []


def test_a_loss_within_its_standard_error_is_none() -> None:
    """Of four queries one has lost a third: 9 % of all, give or take 9 %."""
    encodings = [Encoding(np.zeros(1, np.int32))] * 14
    questions = RetrievalQuestions(
        RetrievalRanking(output="embedding", num_documents=10, grades=[{0: 1}] * 4), encodings
    )
    vectors = [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], *([1 - place / 10, 0.0] for place in range(10))]
    vectors[5][1] = 0.5  # what the last query takes for the best
    found = agreement(questions, [1.0] * 4, {"embedding": rows(*vectors)}, 0.005)
    lost = 1 - 1 / math.log2(3)
    assert found.loss == pytest.approx(lost / 4, abs=1e-5)
    assert found.loss_error == pytest.approx(lost / 4, abs=1e-5)  # deviations 3, 1, 1, 1 quarters: sqrt(12 / 3 / 4)
    assert found.failures == []
    assert agreement(questions, [1.0] * 4, {"embedding": rows(*vectors)}, -0.001).failures != []


def test_an_engine_that_ranks_better_has_lost_nothing() -> None:
    found = made(0, reference=0.9)
    assert found.loss == pytest.approx(-0.11111)
    assert found.failures == []


def test_a_reference_that_hardly_ranks_judges_nobody() -> None:
    """Of a random order on average 4.54 / 20 is left."""
    found = made(3, reference=0.62)
    assert found.ndcg_chance == pytest.approx(sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / 20, abs=1e-5)
    assert found.is_judged  # halfway from 0.227 to 1 is 0.614
    assert not made(3, reference=0.61).is_judged
    assert made(5, reference=0.61).failures == []


def test_without_a_threshold_the_figures_are_reported() -> None:
    found = made(3, max_loss=None)
    assert (found.is_judged, found.failures) == (False, [])
    assert found.loss > 0.3


def test_a_reference_of_zero_has_nothing_to_lose() -> None:
    assert made(3, reference=0.0).loss == 0.0


class Stub:
    """Answers the first token's id of each sequence."""

    def __init__(self) -> None:
        self.info = EngineInfo("stub", "fp32", "none", Limits(8, 2, 8), {"embedding": 1, "other": 1})
        self.num_batches = 0

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        self.num_batches += 1
        found = batch.input_ids[batch.cu_seqlens[:-1], None].astype(np.float32)
        return {"embedding": found, "other": -found}

    def warmup(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing to free."""


def test_an_engine_is_asked_in_batches_within_its_limits_until_it_is_enough() -> None:
    engine = Stub()
    encodings = [Encoding(np.array([index], np.int32)) for index in range(5)]
    questions = RetrievalQuestions(RetrievalRanking(output="embedding", num_documents=4, grades=[{0: 1}]), encodings)
    found: Rows | None = ask_retrieval(engine, questions, lambda: False)
    assert found is not None
    assert [row.tolist() for row in found["embedding"]] == [[0], [1], [2], [3], [4]]
    assert set(found) == {"embedding"}
    assert engine.num_batches == 3
    assert ask_retrieval(engine, questions, lambda: engine.num_batches >= 5) is None
    assert engine.num_batches == 5
