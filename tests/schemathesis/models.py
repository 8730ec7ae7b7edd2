"""Which model a route is for, by its path."""

from __future__ import annotations

from collections.abc import Sequence

# Where the names of the served models stand, as JSON.
MODELS_VARIABLE = "BEITEST_SCHEMATHESIS_MODELS"

# The first that the path has in it. Other routes are asked any model.
_MODEL_OF = {
    "extract": "spans",
    "embed_sparse": "splade",
    "predict_tokens": "ner",
    "predict": "classifier",
    "classify": "classifier",
    "rank": "reranker",
    "score": "reranker",
    "embed": "embedder",
    "multi-vector": "embedder",
    "similarity": "embedder",
    "pooling": "embedder",
    "vertex": "embedder",
}


def model_of(path: str, names: Sequence[str], chance: int) -> str:
    """One of ``names``, by ``chance`` where the path does not decide."""
    return next((name for part, name in _MODEL_OF.items() if part in path), names[chance // 10 % len(names)])
