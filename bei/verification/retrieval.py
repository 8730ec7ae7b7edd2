"""nDCG@10 of an engine and of its reference on a small retrieval set (arXiv:2104.08663 measures retrieval by it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from bei.artifact.certificate.record import RetrievalAgreement
from bei.core import Encoding, Engine, Float32Array
from bei.utils.share_done import Tell, untold
from bei.verification.engine_answers import Rows, batches, joined, run

Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]

_DEPTH = 10
_SCORE_DIGITS = 5  # relative to the query's largest score: nearly equal scores go by position
# The minimum quality of a reference, from chance (0) to perfect (1), for its order to be meaningful.
_LEAST_SKILL = 0.5


class RetrievalRanking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranking of documents by rows of ``output``, and the relevance of documents to queries.

    ``grades[q]``: the relevant documents of query q and their grades. ``candidates[q]``: the documents that are ranked
    for it; None: all. A reranker has one row for each query and candidate ("logits"); other models one for each query,
    then one for each document. Vectors are compared by ``similarity``, at unit length if ``unit_length``; token vectors
    by the sum, over the query's vectors, of the largest product with a document's (ColBERT, arXiv:2004.12832). Tokens
    in ``query_skip_ids`` and ``document_skip_ids`` are left out.
    """

    output: str
    num_documents: int
    grades: list[dict[int, int]]
    candidates: list[list[int]] | None = None
    similarity: Similarity = "dot"
    unit_length: bool = False
    query_skip_ids: list[int] = []
    document_skip_ids: list[int] = []


@dataclass(frozen=True)
class RetrievalQuestions:
    """The encodings for ``ranking``: one for each row, in its order."""

    ranking: RetrievalRanking
    encodings: list[Encoding]


def ask_retrieval(
    engine: Engine, questions: RetrievalQuestions, is_enough: Callable[[], bool], tell: Tell = untold
) -> Rows | None:
    """The engine's rows, in packed batches; None if ``is_enough`` before all are done. Raises EngineError."""
    parts, num_done = list[Rows](), 0
    for batch in batches(questions.encodings, engine.info.limits):
        if is_enough():
            return None
        parts.append(run(engine, batch, [questions.ranking.output]))
        num_done += len(batch)
        tell(num_done, len(questions.encodings))
    return joined(parts)


def agreement(
    questions: RetrievalQuestions, reference: Sequence[float], rows: Rows, max_loss: float | None
) -> RetrievalAgreement:
    """The agreement of an engine with these ``rows`` and a reference with these ``ndcgs``; ``max_loss`` None: only
    reported.

    A loss is a failure if it exceeds ``max_loss`` by more than its standard error: a single swap of two nearly equal
    documents may cost, or gain, more than is allowed.
    """
    ranking = questions.ranking
    theirs, ours = np.array(reference), np.array(ndcgs(questions, rows))
    chance, of_reference, found = (round(float(value), 5) for value in (_chance(ranking), theirs.mean(), ours.mean()))
    loss = error = 0.0
    if of_reference > 0:
        loss = round((of_reference - found) / of_reference, 5)
        spread = float(np.std(theirs - ours, ddof=1)) / len(ours) ** 0.5 if len(ours) > 1 else 0.0
        error = round(spread / of_reference, 5)
    is_judged = max_loss is not None and of_reference >= chance + _LEAST_SKILL * (1 - chance)
    failures = []
    if is_judged and max_loss is not None and loss - error > max_loss:
        failures.append(
            f"nDCG@10 {found:.5f} is {loss:.2%} (standard error {error:.2%}) below the reference's "
            f"{of_reference:.5f}, and at most {max_loss:.2%} is allowed"
        )
    return RetrievalAgreement(
        output=ranking.output,
        num_queries=len(ranking.grades),
        num_documents=ranking.num_documents,
        ndcg_chance=chance,
        ndcg_reference=of_reference,
        ndcg_engine=found,
        loss=loss,
        loss_error=error,
        is_judged=is_judged,
        failures=failures,
    )


def ndcgs(questions: RetrievalQuestions, rows: Rows) -> list[float]:
    """nDCG of each query, to five digits. Documents with NaN or Inf come last."""
    ranking = questions.ranking
    with np.errstate(invalid="ignore", over="ignore"):  # rows may hold NaN and Inf
        all_scores = _scores(questions, rows[ranking.output])
    found = []
    for query, scores in enumerate(all_scores):
        finite = np.isfinite(scores)
        largest = np.abs(scores[finite]).max(initial=1e-12)
        compared = np.where(finite, (np.where(finite, scores, 0.0) / largest).round(_SCORE_DIGITS), -np.inf)
        order = np.argsort(-compared, kind="stable")
        found.append(round(_ndcg_of_order(_grades(ranking, query)[order]), 5))
    return found


def _grades(ranking: RetrievalRanking, query: int) -> npt.NDArray[np.float64]:
    """Grades of the documents that are ranked for ``query``, in their order."""
    known = ranking.grades[query]
    documents = range(ranking.num_documents) if ranking.candidates is None else ranking.candidates[query]
    return np.array([known.get(document, 0) for document in documents], np.float64)


def _ndcg_of_order(grades: npt.NDArray[np.float64]) -> float:
    """nDCG of documents with ``grades``, best first; the gain is the grade itself, as in trec_eval."""
    best = np.sort(grades)[::-1][:_DEPTH]
    return float(grades[:_DEPTH] @ _discounts(len(grades)) / (best @ _discounts(len(best))))


def _chance(ranking: RetrievalRanking) -> float:
    """Mean nDCG of a random order."""
    found = []
    for query in range(len(ranking.grades)):
        grades = _grades(ranking, query)
        best = np.sort(grades)[::-1][:_DEPTH]
        found.append(grades.mean() * _discounts(len(grades)).sum() / (best @ _discounts(len(best))))
    return float(np.mean(found))


def _discounts(count: int) -> npt.NDArray[np.float64]:
    discounts: npt.NDArray[np.float64] = 1 / np.log2(np.arange(2, min(count, _DEPTH) + 2))
    return discounts


def _scores(questions: RetrievalQuestions, rows: Sequence[Float32Array]) -> list[npt.NDArray[np.float64]]:
    """Scores of the documents that are ranked for each query."""
    ranking = questions.ranking
    num_queries = len(ranking.grades)
    if ranking.candidates is not None:
        ends = np.cumsum([len(documents) for documents in ranking.candidates])
        return np.split(np.array([row[0] for row in rows], np.float64), ends[:-1])
    queries, documents = rows[:num_queries], rows[num_queries:]
    if ranking.output == "token_embedding":
        return list(_late_interaction(questions, queries, documents))
    if ranking.output == "token_weights":
        return list(_lexical(questions, queries, documents))
    vectors = [np.stack(side).astype(np.float64) for side in (queries, documents)]
    if ranking.output == "sparse":
        vectors = [np.maximum(side, 0.0) for side in vectors]  # the server returns only weights above zero
    return list(_similarities(vectors[0], vectors[1], ranking))


def _similarities(
    queries: npt.NDArray[np.float64], documents: npt.NDArray[np.float64], ranking: RetrievalRanking
) -> npt.NDArray[np.float64]:
    """Similarities [queries, documents]: larger is closer."""
    if ranking.unit_length or ranking.similarity == "cosine":
        queries, documents = _unit(queries), _unit(documents)
    if ranking.similarity in ("cosine", "dot"):
        scores: npt.NDArray[np.float64] = queries @ documents.T
        return scores
    order = 2 if ranking.similarity == "euclidean" else 1
    return np.stack([-np.linalg.norm(documents - query, ord=order, axis=1) for query in queries])


def _late_interaction(
    questions: RetrievalQuestions, queries: Sequence[Float32Array], documents: Sequence[Float32Array]
) -> npt.NDArray[np.float64]:
    ranking = questions.ranking
    kept = _kept(questions)
    vectors = [rows.astype(np.float64)[mask] for rows, mask in zip((*queries, *documents), kept, strict=True)]
    if ranking.unit_length:
        vectors = [_unit(rows) for rows in vectors]
    sides = vectors[: len(queries)], vectors[len(queries) :]
    scores = [
        [(query @ document.T).max(axis=1, initial=-1e9).sum() if len(document) else -np.inf for document in sides[1]]
        for query in sides[0]
    ]
    return np.array(scores, np.float64)


def _lexical(
    questions: RetrievalQuestions, queries: Sequence[Float32Array], documents: Sequence[Float32Array]
) -> npt.NDArray[np.float64]:
    """Sums of products of the largest weights of common tokens (BGE-M3, arXiv:2402.03216)."""
    weights: list[dict[int, float]] = []
    for encoding, rows, mask in zip(questions.encodings, (*queries, *documents), _kept(questions), strict=True):
        largest: dict[int, float] = {}
        for token, weight in zip(encoding.input_ids[mask].tolist(), rows[mask, 0].tolist(), strict=True):
            largest[token] = max(largest.get(token, 0.0), weight)
        weights.append(largest)
    of_queries, of_documents = weights[: len(queries)], weights[len(queries) :]
    scores = [
        [sum(weight * document.get(token, 0.0) for token, weight in query.items()) for document in of_documents]
        for query in of_queries
    ]
    return np.array(scores, np.float64)


def _kept(questions: RetrievalQuestions) -> list[npt.NDArray[np.bool_]]:
    """Masks of the tokens that count, for each encoding."""
    ranking, num_queries = questions.ranking, len(questions.ranking.grades)
    return [
        ~np.isin(encoding.input_ids, ranking.query_skip_ids if index < num_queries else ranking.document_skip_ids)
        for index, encoding in enumerate(questions.encodings)
    ]


def _unit(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    unit: npt.NDArray[np.float64] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
