"""Request bodies in the dialects of embedding servers, and checks of the answers.

An empty answer with status 200, too few vectors, or nulls would look fast: here they count as failures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

# check(body, num_inputs): None, or what is wrong with the body of an answer.
Check = Callable[[bytes, int], "str | None"]


@dataclass(frozen=True)
class BenchDialect:
    """The dialect of one route. ``fields(texts, query)``: a request's JSON without the model; ``query`` is a
    reranker's.

    ``needs_model``: the server requires the model's name in each request.
    """

    name: str
    path: str
    about: str
    fields: Callable[[Sequence[str], str], dict[str, Any]]
    check: Check
    has_query: bool = False
    needs_model: bool = True

    def body(self, texts: Sequence[str], query: str, model: str | None) -> bytes:
        """A request's body; without a model's name where ``model`` is None."""
        fields = self.fields(texts, query)
        return json.dumps({"model": model, **fields} if model is not None else fields, ensure_ascii=False).encode()


def _openai(texts: Sequence[str], encoding_format: str) -> dict[str, Any]:
    return {"input": texts[0] if len(texts) == 1 else list(texts), "encoding_format": encoding_format}


def _tei(texts: Sequence[object]) -> dict[str, Any]:
    return {"inputs": list(texts), "truncate": True}


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


class _Rank(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranks(msgspec.Struct):
    results: list[_Rank]


class _TeiRank(msgspec.Struct):
    index: int
    score: float


class _TeiLabel(msgspec.Struct):
    label: str
    score: float


class _Classified(msgspec.Struct):
    data: list[msgspec.Raw]


def _checks(kind: Any, problem: Callable[[Any, int], str | None]) -> Check:
    """A check that decodes a body as ``kind``, and then calls ``problem(decoded, num_inputs)``."""
    decoder = msgspec.json.Decoder(kind)

    def check(body: bytes, num_inputs: int) -> str | None:
        if not body:
            return "the body is empty"
        try:
            return problem(decoder.decode(body), num_inputs)
        except RecursionError:
            return "JSON that is nested too deeply"
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return str(error)

    return check


def _vectors_problem(rows: Sequence[msgspec.Raw], num_inputs: int) -> str | None:
    if len(rows) != num_inputs:
        return f"{len(rows)} vectors for {num_inputs} inputs"
    sizes = set()
    for row in rows:
        raw = bytes(row)
        if raw[:1] == b'"' and len(raw) > 2:
            sizes.add(len(raw))  # base64: equal lengths if the vectors have equal lengths
        elif raw[:1] == b"[" and raw[1:-1].strip() and b"n" not in raw:  # null, nan
            sizes.add(raw.count(b","))
        else:
            return "a vector is empty, or none"
    return None if len(sizes) == 1 else "vectors have different lengths"


def _ranks_problem(rows: Sequence[_Rank | _TeiRank], num_inputs: int) -> str | None:
    if sorted(row.index for row in rows) != list(range(num_inputs)):
        return f"{len(rows)} scores for {num_inputs} documents, or not one for each"
    return None


def _labels_problem(are_empty: Sequence[bool], num_inputs: int) -> str | None:
    if len(are_empty) != num_inputs:
        return f"{len(are_empty)} results for {num_inputs} inputs"
    return "a result is empty" if any(are_empty) else None


_OPENAI_CHECK = _checks(_Embeddings, lambda found, num: _vectors_problem([row.embedding for row in found.data], num))

DIALECTS = {
    dialect.name: dialect
    for dialect in (
        BenchDialect(
            *("openai", "/v1/embeddings", "embeddings in base64"),  # base64: OpenAI's own client asks for it
            lambda texts, query: _openai(texts, "base64"),
            _OPENAI_CHECK,
        ),
        BenchDialect(
            *("openai-float", "/v1/embeddings", "embeddings as numbers"),
            lambda texts, query: _openai(texts, "float"),
            _OPENAI_CHECK,
        ),
        BenchDialect(
            *("tei", "/embed", "text-embeddings-inference: embeddings"),
            lambda texts, query: _tei(texts),
            _checks(list[msgspec.Raw], _vectors_problem),
            needs_model=False,
        ),
        BenchDialect(
            *("rerank", "/v1/rerank", "Cohere, Jina, vLLM, Infinity"),
            lambda texts, query: {"query": query, "documents": list(texts), "return_documents": False},
            _checks(_Ranks, lambda found, num: _ranks_problem(found.results, num)),
            has_query=True,
        ),
        BenchDialect(
            *("tei-rerank", "/rerank", "text-embeddings-inference: scores"),
            lambda texts, query: {"query": query, "texts": list(texts), "truncate": True},
            _checks(list[_TeiRank], _ranks_problem),
            has_query=True,
            needs_model=False,
        ),
        BenchDialect(
            *("classify", "/classify", "vLLM, Infinity"),
            lambda texts, query: {"input": list(texts)},
            _checks(
                _Classified,
                lambda found, num: _labels_problem([bytes(row) in (b"null", b"[]", b"{}") for row in found.data], num),
            ),
        ),
        BenchDialect(
            *("tei-predict", "/predict", "text-embeddings-inference: labels"),
            lambda texts, query: _tei([[text] for text in texts]),
            _checks(list[list[_TeiLabel]], lambda rows, num: _labels_problem([not row for row in rows], num)),
            needs_model=False,
        ),
    )
}
