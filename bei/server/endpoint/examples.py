"""Examples of requests and their answers for /openapi.json, and what several of them share.

Answers have the fields and types of real ones: tests/bei/server/openapi/test_examples.py sends every request to a
server and compares. Vectors are cut to three numbers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Example(NamedTuple):
    """The body of a request, and of the answer to it."""

    request: Any
    answer: Any


# In answers. Requests name no model, and so work wherever one model has the task.
EMBEDDER: Final = "all-MiniLM-L6-v2"
RERANKER: Final = "ms-marco-MiniLM-L6-v2"
CLASSIFIER: Final = "distilbert-base-uncased-finetuned-sst-2-english"

TEXTS: Final = ["one text", "another"]
VECTORS: Final = [[0.0227, 0.0658, -0.0013], [-0.092, -0.0888, -0.1182]]
NUM_TOKENS: Final = 7  # of both texts

QUERY: Final = "The capital?"
DOCUMENTS: Final = ["Sydney is large.", "Canberra is the capital."]
# Of documents 1 and 0, the order of a rerank.
SCORES: Final = (0.9871, 0.0124)
RERANK_TOKENS: Final = 21

REVIEW: Final = "What a day!"
REVIEW_TOKENS: Final = 6
LABEL_SCORES: Final = [{"score": 0.9998, "label": "POSITIVE"}, {"score": 0.0002, "label": "NEGATIVE"}]

IDS: Final = [101, 7592, 2088, 102]  # of "hello world"
HEX: Final = "9f1c66b2d5e04a7a8a3c0f7b1d24e6a8"
UUID: Final = "9f1c66b2-d5e0-4a7a-8a3c-0f7b1d24e6a8"
CREATED: Final = 1767225600


def embedding_items() -> list[dict[str, Any]]:
    """``VECTORS`` in OpenAI's form."""
    return [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(VECTORS)]


def token_usage(num_tokens: int) -> dict[str, int]:
    """OpenAI's."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def sorted_documents(score: str, document: str | None = None, *, is_object: bool = False) -> list[dict[str, Any]]:
    """The two documents, best first. ``score`` and ``document``: names of their fields; None: there is no document."""
    found: list[dict[str, Any]] = []
    for index, value in zip((1, 0), SCORES, strict=True):
        text = DOCUMENTS[index]
        written = {} if document is None else {document: {"text": text} if is_object else text}
        found.append({"index": index, score: value, **written})
    return found


METRICS: Final = """\
# HELP bei_requests_total HTTP requests answered, by route and status
# TYPE bei_requests_total counter
bei_requests_total{route="/v1/embeddings",status="200"} 3.0
"""
