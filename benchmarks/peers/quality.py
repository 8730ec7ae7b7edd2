"""What a peer's speed costs: cosines of its vectors to the FP32 reference's, or the order of a reranker's documents;
nDCG@10 on SciFact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.error import HTTPError

import numpy as np

from bei.core import Float32Array
from benchmarks.harness.texts import PASSAGES, SHORT, Prose
from benchmarks.peers.data import Model
from benchmarks.peers.sides import Side
from benchmarks.scifact import read

REFERENCES = ("sentence-transformers torch FP32", "bei FP32", "bei.Model FP32")
NUM_TEXTS, NUM_QUERIES, NUM_DOCUMENTS = 256, 10, 50


def compared(model: Model, sides: Sequence[Side], prose: Prose) -> dict[str, Any]:
    """Every side against the first of REFERENCES that runs; empty where none does. A server that refuses some of the
    texts has no row."""
    by_name = {side.peer.name: side for side in sides}
    reference = next((by_name[name] for name in REFERENCES if name in by_name), None)
    if reference is None:
        return {}
    found: dict[str, Any] = {"reference": reference.peer.name}
    if model.task == "embed":
        texts = prose.take(NUM_TEXTS, PASSAGES)
        exact = reference.vectors(texts)
        rows = _answered(sides, lambda side: _cosines(side.vectors(texts), exact))
    else:
        pairs = [(prose.take(1, SHORT)[0], prose.take(NUM_DOCUMENTS, PASSAGES)) for _ in range(NUM_QUERIES)]
        scores = [reference.scores(pair) for pair in pairs]
        rows = _answered(sides, lambda side: _orders([side.scores(pair) for pair in pairs], scores))
    return {**found, "sides": rows}


def scifact(sides: Sequence[Side]) -> dict[str, Any]:
    """nDCG@10 of each side, of all queries over all documents."""
    dataset = read()
    documents = list(dataset.documents.values())
    queries = [dataset.queries[query] for query in dataset.relevance]
    found = {}
    for side in sides:
        found[side.peer.name] = round(dataset.ndcg(side.vectors(queries), side.vectors(documents)), 4)
        print(f"SciFact {side.peer.name}: {found[side.peer.name]}", flush=True)
    return found


def _answered(sides: Sequence[Side], ask: Callable[[Side], dict[str, float]]) -> dict[str, dict[str, float]]:
    rows = {}
    for side in sides:
        try:
            rows[side.peer.name] = ask(side)
        except HTTPError as refusal:
            print(f"{side.peer.name}: no figure of quality: {refusal}", flush=True)
    return rows


def _cosines(vectors: Float32Array, exact: Float32Array) -> dict[str, float]:
    cosines = np.einsum("ij,ij->i", vectors, exact)
    return {"mean": round(float(cosines.mean()), 6), "lowest": round(float(cosines.min()), 6)}


def _orders(scores: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> dict[str, float]:
    """``spearman``: of the scores of a query's documents, mean and lowest over queries: some peers answer logits."""

    def ranks(values: Sequence[float]) -> Float32Array:
        found: Float32Array = np.argsort(np.argsort(values)).astype(np.float32)
        return found

    values = [float(np.corrcoef(ranks(a), ranks(b))[0, 1]) for a, b in zip(scores, exact, strict=True)]
    return {"spearman mean": round(float(np.mean(values)), 6), "spearman lowest": round(min(values), 6)}
