"""Retrieval quality: MiniLM on BEIR's SciFact, nDCG@10 of the engine in FP32 and BF16 against the reference's, and of
vectors of bytes: int8 as the server answers them, compared as they are.

    python -m benchmarks.scifact

All 809 queries of qrels.tsv over the 5,183 documents (title and text), 256 tokens, cosine. The data are fetched by
``python -m tests.real.fetch scifact``. Ends with 1 if any is further from the reference than 0.002.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact.int8 import int8_of
from bei.artifact.manifest import Artifact
from bei.core import Engine, Float32Array
from bei.verification.engine_answers import batches, joined, run
from benchmarks.harness.engines import encoder_of, loaded
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from tests.real.models import cache_dir

REFERENCE = 0.6602  # sentence-transformers, FP32, on the same queries
TOLERANCE = 0.002
_MAX_TOKENS = 256
_RANKS = 10
_QUERIES_AT_A_TIME = 128


@dataclass(frozen=True)
class Dataset:
    """Texts by id, and how relevant which documents are to a query."""

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    relevance: Mapping[str, Mapping[str, int]]

    def ndcg(self, queries: Float32Array, documents: Float32Array) -> float:
        """nDCG@10 of rankings by these vectors, of the queries in ``relevance`` and of all documents."""
        return ndcg(rank(queries, documents), list(self.documents), list(self.relevance.values()))


def main() -> int:
    dataset = read()
    with tempfile.TemporaryDirectory() as scratch:
        results: dict[str, Any] = {}
        for precision in ("fp32", "bf16"):
            results |= measured(dataset, precision, Path(scratch))
    facts = {"documents": len(dataset.documents), "queries": len(dataset.relevance), "max_tokens": _MAX_TOKENS}
    write("scifact", {**facts, "reference_ndcg_at_10": REFERENCE, "tolerance": TOLERANCE, **results})
    return 0 if all(abs(result["ndcg_at_10"] - REFERENCE) <= TOLERANCE for result in results.values()) else 1


def read() -> Dataset:
    """The fetched files in BEIR's format. Queries without a relevant document are left out."""
    folder = cache_dir() / "scifact"
    if not (folder / "corpus.jsonl").is_file():
        raise SystemExit(f"{folder} has no corpus.jsonl: python -m tests.real.fetch scifact")
    documents = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in _rows(folder / "corpus.jsonl")}
    relevance: dict[str, dict[str, int]] = {}
    with (folder / "qrels.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            relevance.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    queries = {row["_id"]: row["text"] for row in _rows(folder / "queries.jsonl") if row["_id"] in relevance}
    return Dataset(documents, queries, relevance)


def measured(dataset: Dataset, precision: str, scratch: Path) -> dict[str, Any]:
    """nDCG@10 of one precision, and of the bytes of its vectors."""
    artifact = built(minilm_folder(), scratch, precision=precision, max_seq_len=_MAX_TOKENS)
    with loaded(artifact) as engine:
        documents = embed(engine, artifact, list(dataset.documents.values()))
        queries = embed(engine, artifact, [dataset.queries[query] for query in dataset.relevance])
    largest = artifact.manifest.embedding.int8_largest if artifact.manifest.embedding else None
    assert largest is not None  # the build verifies
    coded = [int8_of(vectors, largest).astype(np.float32) for vectors in (queries, documents)]
    lengths = np.linalg.norm(coded[1], axis=1)
    cosines = np.einsum("ij,ij->i", coded[1], documents) / lengths
    found = {}
    for name, vectors in ((precision, [queries, documents]), (f"{precision}, int8 vectors", coded)):
        value = dataset.ndcg(*vectors)
        found[name] = {"ndcg_at_10": round(value, 4), "difference": round(value - REFERENCE, 4)}
    found[f"{precision}, int8 vectors"] |= {"mean cosine": round(float(cosines.mean()), 5), "largest": largest}
    return found


def embed(engine: Engine, artifact: Artifact, texts: Sequence[str]) -> Float32Array:
    """Unit vectors of ``texts``, in batches of similar length."""
    encodings = encoder_of(artifact).encode(texts)
    order = sorted(range(len(texts)), key=lambda index: encodings[index].num_tokens)
    cut = batches([encodings[index] for index in order], engine.info.limits)
    vectors = np.zeros((len(texts), engine.info.outputs["embedding"]), np.float32)
    vectors[order] = joined([run(engine, batch, ["embedding"]) for batch in cut])["embedding"]
    unit: Float32Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def rank(queries: Float32Array, documents: Float32Array) -> list[list[int]]:
    """Positions of the nearest documents of every query, the nearest first."""
    ranked: list[list[int]] = []
    for start in range(0, len(queries), _QUERIES_AT_A_TIME):
        similarities = queries[start : start + _QUERIES_AT_A_TIME] @ documents.T
        ranked += np.argsort(-similarities, axis=1, kind="stable")[:, :_RANKS].tolist()
    return ranked


def ndcg(ranked: Sequence[Sequence[int]], ids: Sequence[str], relevance: Sequence[Mapping[str, int]]) -> float:
    """Mean normalized discounted cumulative gain over the first ranks (linear gain, as in trec_eval)."""
    discounts = 1 / np.log2(np.arange(2, _RANKS + 2))
    values = []
    for positions, relevant in zip(ranked, relevance, strict=True):
        gains = np.array([relevant.get(ids[position], 0) for position in positions])
        best = np.sort(list(relevant.values()))[::-1][:_RANKS]
        values.append(float(gains @ discounts[: len(gains)]) / float(best @ discounts[: len(best)]))
    return float(np.mean(values))


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    sys.exit(main())
