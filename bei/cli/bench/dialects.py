"""The bodies of requests in the dialects of servers, and whether an answer is what was asked for.

A server that answers 200 with nothing in it, with too few vectors or with nulls would look fast: that is a failure
here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

# Whether an answer is right: None, or what is wrong with it.
Check = Callable[[bytes, int], "str | None"]


@dataclass(frozen=True)
class BenchDialect:
    """How one route is asked. ``body(texts, query, model)``: of the ``texts`` of a request; ``query`` for rerankers.
    ``needs_model``: servers want to be told which model they serve."""

    name: str
    path: str
    about: str
    body: Callable[[Sequence[str], str, str | None], bytes]
    check: Check
    has_query: bool = False
    needs_model: bool = True


def _json(fields: dict[str, object], model: str | None) -> bytes:
    return json.dumps({"model": model, **fields} if model is not None else fields, ensure_ascii=False).encode()


def _openai(texts: Sequence[str], query: str, model: str | None) -> bytes:
    given = texts[0] if len(texts) == 1 else list(texts)
    return _json({"input": given, "encoding_format": "base64"}, model)  # base64: as OpenAI's own client asks


def _openai_floats(texts: Sequence[str], query: str, model: str | None) -> bytes:
    return _json({"input": texts[0] if len(texts) == 1 else list(texts), "encoding_format": "float"}, model)


def _tei(texts: Sequence[str], query: str, model: str | None) -> bytes:
    return _json({"inputs": list(texts), "truncate": True}, model)


def _rerank(texts: Sequence[str], query: str, model: str | None) -> bytes:
    return _json({"query": query, "documents": list(texts), "return_documents": False}, model)


def _tei_rerank(texts: Sequence[str], query: str, model: str | None) -> bytes:
    return _json({"query": query, "texts": list(texts), "truncate": True}, model)


def _classify(texts: Sequence[str], query: str, model: str | None) -> bytes:
    return _json({"input": list(texts)}, model)


def _tei_predict(texts: Sequence[str], query: str, model: str | None) -> bytes:
    return _json({"inputs": [[text] for text in texts], "truncate": True}, model)


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


class _Scored(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Scored]


class _TeiScored(msgspec.Struct):
    index: int
    score: float


class _Labelled(msgspec.Struct):
    label: str
    score: float


class _Classified(msgspec.Struct):
    data: list[msgspec.Raw]


_EMBEDDINGS, _TEI_VECTORS = msgspec.json.Decoder(_Embeddings), msgspec.json.Decoder(list[msgspec.Raw])
_RANKING, _TEI_RANKING = msgspec.json.Decoder(_Ranking), msgspec.json.Decoder(list[_TeiScored])
_LABELS, _CLASSIFIED = msgspec.json.Decoder(list[list[_Labelled]]), msgspec.json.Decoder(_Classified)


def _checked(check: Check) -> Check:
    """``check``, for which a body that cannot be decoded is wrong."""

    def checked(body: bytes, num_inputs: int) -> str | None:
        if not body:
            return "the body is empty"
        try:
            return check(body, num_inputs)
        except msgspec.MsgspecError as error:
            return str(error)

    return checked


@_checked
def _check_openai(body: bytes, num_inputs: int) -> str | None:
    return _vectors([one.embedding for one in _EMBEDDINGS.decode(body).data], num_inputs)


@_checked
def _check_tei(body: bytes, num_inputs: int) -> str | None:
    return _vectors(_TEI_VECTORS.decode(body), num_inputs)


@_checked
def _check_rerank(body: bytes, num_inputs: int) -> str | None:
    return _ranks([one.index for one in _RANKING.decode(body).results], num_inputs)


@_checked
def _check_tei_rerank(body: bytes, num_inputs: int) -> str | None:
    return _ranks([one.index for one in _TEI_RANKING.decode(body)], num_inputs)


@_checked
def _check_classify(body: bytes, num_inputs: int) -> str | None:
    rows = _CLASSIFIED.decode(body).data
    if len(rows) != num_inputs:
        return f"{len(rows)} results for {num_inputs} inputs"
    return None if all(bytes(row) not in (b"null", b"[]", b"{}") for row in rows) else "a result is empty"


@_checked
def _check_tei_predict(body: bytes, num_inputs: int) -> str | None:
    rows = _LABELS.decode(body)
    if len(rows) != num_inputs:
        return f"{len(rows)} results for {num_inputs} inputs"
    return None if all(rows) else "a result is empty"


def _vectors(rows: Sequence[msgspec.Raw], num_inputs: int) -> str | None:
    if len(rows) != num_inputs:
        return f"{len(rows)} vectors for {num_inputs} inputs"
    sizes = set()
    for row in rows:
        raw = bytes(row)
        if raw[:1] == b'"' and len(raw) > 2:
            sizes.add(len(raw))  # base64: equally long where the vectors are
        elif raw[:1] == b"[" and raw[1:-1].strip() and b"n" not in raw:  # null, nan
            sizes.add(raw.count(b","))
        else:
            return "a vector is empty, or none"
    return None if len(sizes) == 1 else "vectors have different lengths"


def _ranks(indices: Sequence[int], num_inputs: int) -> str | None:
    if sorted(indices) != list(range(num_inputs)):
        return f"{len(indices)} scores for {num_inputs} documents, or not one for each"
    return None


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        BenchDialect("openai", "/v1/embeddings", "embeddings in base64", _openai, _check_openai),
        BenchDialect("openai-float", "/v1/embeddings", "embeddings as numbers", _openai_floats, _check_openai),
        BenchDialect("tei", "/embed", "text-embeddings-inference: embeddings", _tei, _check_tei, needs_model=False),
        BenchDialect("rerank", "/v1/rerank", "Cohere, Jina, vLLM, Infinity", _rerank, _check_rerank, has_query=True),
        BenchDialect(
            *("tei-rerank", "/rerank", "text-embeddings-inference: scores", _tei_rerank, _check_tei_rerank),
            has_query=True,
            needs_model=False,
        ),
        BenchDialect("classify", "/classify", "vLLM, Infinity", _classify, _check_classify),
        BenchDialect(
            *("tei-predict", "/predict", "text-embeddings-inference: labels", _tei_predict, _check_tei_predict),
            needs_model=False,
        ),
    )
}
